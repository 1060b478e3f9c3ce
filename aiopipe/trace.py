"""From a JAX function to a `Graph`.

Calls inside the function are inlined, so that each operation can go to another device; loops and
branches stay one node. Arrays that the function closed over become weights like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ._arguments import Leaf, flattener, input_names, parameter_names, path_name, unflattener
from ._jax import config_snapshot
from ._jax_cost import flops, nbytes_moved
from ._jax_lift import Lifted, nested_consts
from ._jax_source import is_library_function, source_line
from ._jax_types import dtype_name, is_scalar, nbytes_of, spec_of
from ._jaxpr import INLINED, EffectKind, Equation, FlatJaxpr, copy_equation, effect_kind, inner_jaxpr, make_jaxpr
from ._specs import check_new_state, state_specs
from .errors import TraceError
from .graph import Graph, Tensor
from .graph_builder import GraphBuilder

__all__ = ["trace"]


def trace(fn: Callable[..., Any], weights: Any, *inputs: Any, state: Any = None, name: str | None = None) -> Graph:
    """Trace ``fn(weights, *inputs)``, or ``fn(weights, state, *inputs)``; nothing is computed.

    Args:
        fn: a function that `jax.jit` could take. `jit`, `custom_jvp`, `custom_vjp` and `checkpoint`
            inside it are inlined; `scan`, `while`, `cond` and other primitives with bodies are one
            node each. What says how to compile or differentiate a call (shardings, donation, compiler
            options, barriers of `checkpoint`) has no effect on the graph.
        weights: a pytree of what stays the same: arrays, scalars, keys, or `Tensor`s.
        inputs: pytrees of arrays, `jax.ShapeDtypeStruct`s, or scalars that show what each evaluation gives.
            Only their shapes and types count.
        state: a `State`, or a pytree that shows one as `inputs` do: then `fn` takes it behind the weights
            and returns ``(outputs, new_state)``, where `new_state` has the structure, shapes and types of `state`.
        name: of the graph; the function's own by default.

    Returns:
        The graph. Weights are named by their path in `weights`, inputs by the parameter and their path in
        it (``"batch/ids"``), outputs by their path in the result (``"out"`` for a single one), arrays that
        the function closed over ``"closure/0"``, …; operations on which no output depends are left out.

    Raises:
        TensorError: a leaf is nothing that JAX computes with.
        TraceError: the function has ordered effects or uses mutable references (`jax.new_ref`), or with
            `state` returns something else than outputs and the new state.
    """
    has_state = state is not None
    if name is None:
        bare = fn.func if isinstance(fn, functools.partial) else fn
        name = getattr(bare, "__name__", type(bare).__name__)
    parameters = parameter_names(fn, len(inputs), before=2 if has_state else 1)
    input_leaves, input_tree = jax.tree_util.tree_flatten(inputs)
    weight_leaves, weight_tree = jax.tree_util.tree_flatten_with_path(weights)
    state_leaves, state_tree = jax.tree_util.tree_flatten_with_path(state_specs(state))
    n_inputs = len(input_leaves)
    builder = GraphBuilder(name)
    examples: list[Any] = []
    checked: list[Leaf] = []
    known: dict[int, int] = {}  # arrays among the weights, by identity
    for label, leaf in zip(input_names(parameters, inputs), input_leaves, strict=True):
        spec = spec_of(leaf, label)
        examples.append(spec)
        checked.append(Leaf(label, spec.shape, spec.dtype))
        builder.input(label, *_node_spec(spec))
    for path, leaf in weight_leaves:
        label = path_name(path) or "weights"
        spec = spec_of(leaf, label)
        examples.append(spec)
        source: Any = leaf
        buffers: tuple[Any, ...] = ()
        if isinstance(leaf, Tensor):
            buffers = leaf.buffers
        elif isinstance(leaf, jax.ShapeDtypeStruct):
            source = None
        elif is_scalar(leaf):
            source = np.asarray(leaf, spec.dtype)
        else:
            known[id(leaf)] = len(examples) - 1
        builder.weight(label, *_node_spec(spec), source=source, buffers=buffers)
    n_before = len(examples)
    for path, leaf in state_leaves:
        label = path_name(path) or "state"
        examples.append(spec_of(leaf, label))
        builder.state(label, *_node_spec(examples[-1]))

    def call(*values: Any) -> Any:
        before = [jax.tree_util.tree_unflatten(weight_tree, values[n_inputs:n_before])]
        if has_state:
            before.append(jax.tree_util.tree_unflatten(state_tree, values[n_before:]))
        return fn(*before, *jax.tree_util.tree_unflatten(input_tree, values[:n_inputs]))

    jaxpr, shapes = make_jaxpr(call, examples)
    if has_state:
        check_new_state(name, shapes, state_tree, examples[n_before:])
    emitter = _Emitter(builder, len(examples), known)
    results = emitter.run(jaxpr, n_before)
    outputs = results[: len(results) - len(state_leaves)]
    output_paths, output_tree = jax.tree_util.tree_flatten_with_path(shapes[0] if has_state else shapes)
    return builder.build(
        outputs,
        output_names=["out"] if len(outputs) == 1 else [path_name(path) for path, _ in output_paths],
        flatten_inputs=flattener(name, parameters, checked, input_tree),
        unflatten_outputs=unflattener(output_tree),
        new_state=results[len(outputs) :],
        config=config_snapshot(),
    )


def _node_spec(aval: Any) -> tuple[tuple[int, ...], str, int]:
    """What `GraphBuilder` wants to know: shape, name of the element type, bytes."""
    shape = tuple(aval.shape)
    return shape, dtype_name(aval.dtype), nbytes_of(shape, aval.dtype)


# Equations ----------------------------------------------------------------------------------------


class _Pending(NamedTuple):
    """An operation on numbered values, before it is known whether anybody needs it."""

    eqn: Any
    operands: list[Any]  # numbers of values, or literals
    outs: range  # numbers of values
    consts: list[Any]  # nested ones; their numbers are the last operands
    has_effect: bool
    source: str | None


class _Emitter:
    """Flattens a jaxpr into a builder.

    Values are numbered as they come up; the numbers of inputs and weights are their tensor ids.
    """

    def __init__(self, builder: GraphBuilder, n_leaves: int, known: dict[int, int]) -> None:
        self.builder = builder
        self.n_leaves = n_leaves
        self.n_values = n_leaves
        self.numbers = known  # of arrays, by identity; their owners keep them alive
        self.consts: dict[int, Any] = {}
        self.pending: list[_Pending] = []
        self.tensors: dict[int, int] = {}

    def run(self, jaxpr: FlatJaxpr, first_state: int) -> list[int]:
        """Emit the operations that the outputs need; return the tensor ids of the outputs.

        Leaves from `first_state` on are the state; the last outputs, one for each, are its new values.
        """
        outs = self.walk(jaxpr, list(range(self.n_leaves)), None)
        self.separate(jaxpr, outs, first_state)
        live = {v for v in outs if type(v) is int}
        kept: list[_Pending] = []
        for item in reversed(self.pending):
            if item.has_effect or not live.isdisjoint(item.outs):
                live.update(v for v in item.operands if type(v) is int)
                kept.append(item)
        self.tensors = {v: v for v in range(self.n_leaves)}
        for n, value in enumerate(v for v in self.consts if v in live):
            const, name = self.consts[value], f"closure/{n}"
            if not isinstance(const, (jax.Array, np.ndarray)):  # JAX's typed literals
                const = np.asarray(const)
            self.tensors[value] = self.builder.weight(name, *_node_spec(spec_of(const, name)), source=const)
        for item in reversed(kept):
            self.emit(item)
        ids, n_literals = [], 0
        for out in outs:
            if type(out) is not int:
                literal = np.asarray(out.val, out.aval.dtype)
                ids.append(self.builder.weight(f"literal/{n_literals}", *_node_spec(out.aval), source=literal))
                n_literals += 1
            else:
                ids.append(self.tensors[out])
        return ids

    def separate(self, jaxpr: FlatJaxpr, outs: list[Any], first_state: int) -> None:
        """Copy where an output, or two leaves of the state, would share memory that the next evaluation takes over."""
        n_outputs = len(outs) - (self.n_leaves - first_state)
        taken: set[int] = set()
        for i in range(n_outputs, len(outs)):
            leaf = first_state + i - n_outputs
            made_for_it = type(outs[i]) is int and outs[i] >= self.n_leaves and outs[i] not in self.consts
            if outs[i] != leaf and (not made_for_it or outs[i] in taken):
                self.copy(jaxpr, outs, i)
            taken.add(outs[i])
        for i in range(n_outputs):
            if type(outs[i]) is int and (outs[i] in taken or first_state <= outs[i] < self.n_leaves):
                self.copy(jaxpr, outs, i)

    def copy(self, jaxpr: FlatJaxpr, outs: list[Any], i: int) -> None:
        """Have result `i` be a copy."""
        value = outs[i] if type(outs[i]) is int else self.number(np.asarray(outs[i].val, outs[i].aval.dtype))
        made = range(self.n_values, self.n_values + 1)
        self.n_values = made.stop
        self.pending.append(_Pending(copy_equation(jaxpr.outvars[i].aval), [value], made, [], False, None))
        outs[i] = made.start

    def walk(self, jaxpr: FlatJaxpr, args: Sequence[Any], source: str | None) -> list[Any]:
        """Queue the operations of a jaxpr, with what it calls inlined; return its results.

        `source` stands for the lines of everything in it, where these would be a library's.
        """
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
            env[var] = self.number(const)

        def read(atom: Any) -> Any:
            if hasattr(atom, "val"):
                return self.number(atom.val) if np.ndim(atom.val) else atom
            return env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            kind = effect_kind(eqn) if eqn.effects else EffectKind.NONE
            inner = inner_jaxpr(eqn)
            # A call within which references live and die stays whole; any other effect is found inside.
            if inner is not None and not (kind is EffectKind.NONE and eqn.effects):
                outside = source
                if outside is None and is_library_function(eqn.params[INLINED[eqn.primitive.name]]):
                    outside = source_line(eqn) or None
                env.update(zip(eqn.outvars, self.walk(inner, operands, outside), strict=True))
                continue
            if kind in (EffectKind.ORDERED, EffectKind.REF):
                raise _effect_error(eqn, kind, self.builder.name, source or source_line(eqn))
            consts = nested_consts(eqn) if eqn.params else []
            operands += [self.number(const) for const in consts]
            outs = range(self.n_values, self.n_values + len(eqn.outvars))
            self.n_values = outs.stop
            env.update(zip(eqn.outvars, outs, strict=True))
            self.pending.append(_Pending(eqn, operands, outs, consts, kind is EffectKind.UNORDERED, source))
        return [read(atom) for atom in jaxpr.outvars]

    def number(self, const: Any) -> int:
        """The number of an array that the function closed over: one for each, however often it comes up."""
        found = self.numbers.get(id(const))
        if found is None:
            found = self.numbers[id(const)] = self.n_values
            self.consts[found] = const
            self.n_values += 1
        return found

    def emit(self, item: _Pending) -> None:
        """Add the node of an operation."""
        eqn = item.eqn
        inputs: dict[int, int] = {}  # positions, by tensor id: each is an input once
        slots: list[int | None] = []
        literals: list[Any] = []
        for operand in item.operands:
            if type(operand) is int:
                slots.append(inputs.setdefault(self.tensors[operand], len(inputs)))
            else:
                slots.append(None)
                literals.append(operand.val)
        op: Equation
        if item.consts:
            op = Lifted(eqn, tuple(slots), tuple(literals), item.consts)
        else:
            op = Equation(eqn, tuple(slots), tuple(literals))
        ids = self.builder.node(
            eqn.primitive.name,
            list(inputs),
            [_node_spec(var.aval) for var in eqn.outvars],
            fn=op,
            source=item.source or source_line(eqn),
            flops=flops(eqn),
            nbytes=nbytes_moved(eqn),
            has_effect=item.has_effect,
        )
        self.tensors.update(zip(item.outs, ids, strict=True))


def _effect_error(eqn: Any, kind: EffectKind, name: str, source: str) -> TraceError:
    where = f"{eqn.primitive.name} at {source or 'an unknown line'}"
    if kind is EffectKind.ORDERED:
        return TraceError(
            f"cannot trace {name!r}: {where} has an ordered effect, but evaluations overlap and their operations run "
            "on several devices: use ordered=False, or call it outside of the function, on its result"
        )
    return TraceError(
        f"cannot trace {name!r}: {where} uses a mutable reference, which cannot follow its operations to their "
        "devices: return the new value instead, or make, use and read the reference within one jitted function"
    )
