"""The world of CPU devices for `plays`: a few functions of JAX, some of whose callbacks wait, or fail, when told to.

Values are integers that wrap around, so results are equal to the last bit whatever was computed where. The functions
are few, for what costs time is compiling them; what is done with them is drawn.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import aiopipe as ap
from aiopipe.graph import Graph
from executables import jit
from simprograms import POISON, GraphSpec, NodeSpec

WIDTH = 4
VALUE = jax.ShapeDtypeStruct((WIDTH,), jnp.int32)

bad: set[int] = set()
"""First elements of inputs for which a callback fails."""

gate = threading.Event()
"""Callbacks wait until it is open."""
gate.set()


def array(number: int) -> np.ndarray[Any, Any]:
    """A value that tells which evaluation it belongs to."""
    return np.arange(WIDTH, dtype=np.int32) + 1000 * number


def _check(first: Any, value: Any) -> Any:
    gate.wait()
    if int(np.asarray(first)[0]) in bad:
        raise ArithmeticError("poisoned")
    return np.asarray(value)


def _loop(a: Any, i: int) -> Any:
    return jax.lax.fori_loop(0, 3, lambda k, v: v * 3 + k + i, a)


OPS = (
    lambda a, i: a * 5 + i,
    lambda a, i: jnp.sort(a) + i,
    lambda a, i: jax.lax.scan(lambda c, x: (c * 3 + x, c ^ x), jnp.int32(i), a)[1],
    lambda a, i: a[a & 3] - i,
    lambda a, i: jax.lax.cond(a[0] & 1 == 1, lambda v: v + i, lambda v: v * 7, a),
    lambda a, i: a.at[a & 3].add(i),
    _loop,
    lambda a, i: (a[:, None] * a[None, :] + i).sum(axis=0),
)


def _evaluate(spec: GraphSpec, weights: Any, state: Any, inputs: Any, *, fallible: bool) -> tuple[Any, Any]:
    tensors = [*inputs, *weights, *state]
    for i, node in enumerate(spec.nodes):
        a = functools.reduce(lambda a, c: a * 5 + c, [tensors[r % len(tensors)] for r in node.reads], array(i))
        a = OPS[i % len(OPS)](jnp.asarray(a), i)
        if node.can_fail and fallible:
            a = jax.pure_callback(_check, VALUE, tensors[0], a)
        tensors += [a * (1 + 2 * k) for k in range(node.n_outputs)]
    return tuple(tensors[o % len(tensors)] for o in spec.outputs), [tensors[n % len(tensors)] for n in spec.new]


def _poisoned(spec: GraphSpec, *, fails: bool, leaves: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which outputs and leaves come from callbacks that fail, or from leaves that are lost."""
    tensors = [False] * (spec.n_inputs + spec.n_weights) + list(leaves)
    for node in spec.nodes:
        hit = (fails and node.can_fail) or any(tensors[r % len(tensors)] for r in node.reads)
        tensors += [hit] * node.n_outputs
    return [tensors[o % len(tensors)] for o in spec.outputs], [tensors[n % len(tensors)] for n in spec.new]


class Function:
    """One of the functions, traced once."""

    def __init__(self, spec: GraphSpec) -> None:
        weights = [array(7 + i) for i in range(spec.n_weights)]
        inputs, state = [VALUE] * spec.n_inputs, [VALUE] * spec.n_leaves

        def stateless(weights: Any, *inputs: Any) -> Any:
            return _evaluate(spec, weights, (), inputs, fallible=True)[0]

        def stateful(weights: Any, state: Any, *inputs: Any) -> Any:
            return _evaluate(spec, weights, state, inputs, fallible=True)

        graph = ap.trace(stateful, weights, *inputs, state=state) if state else ap.trace(stateless, weights, *inputs)
        self.spec, self.graph = spec, graph
        self._oracle = jit(lambda state, *inputs: _evaluate(spec, weights, state, inputs, fallible=False))

    def cut(self, n_devices: int, how: int) -> list[int]:
        """A backend for each node: one of a few ways, in runs."""
        n, cut = len(self.graph.nodes), (self.spec.cut, self.spec.cut[::-1], (0,))[how]
        return [cut[i * len(cut) // n] % n_devices for i in range(n)]

    def expected(self, inputs: Sequence[Any], state: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        lost = [v is POISON for v in state]
        known = [array(0) if v is POISON else v for v in state]
        made = ([np.asarray(v) for v in part] for part in self._oracle(known, *inputs))
        hits = _poisoned(self.spec, fails=int(inputs[0][0]) in bad, leaves=lost)
        outputs, new = (
            [POISON if hit else v for v, hit in zip(values, of, strict=True)]
            for values, of in zip(made, hits, strict=True)
        )
        return outputs, new


function_of = functools.cache(Function)


def _draw(rng: random.Random, n_leaves: int) -> GraphSpec:
    nodes = tuple(
        NodeSpec(tuple(rng.choices(range(41), k=rng.randint(0, 3))), rng.choice([1, 1, 2]), 0.0, rng.random() < 0.25)
        for _ in range(rng.randint(2, 7))
    )
    numbers = functools.partial(rng.choices, range(41))
    cut = tuple(sorted(rng.choices(range(4), k=len(nodes)))) if rng.random() < 0.5 else tuple(numbers(k=len(nodes)))
    return GraphSpec(
        rng.randint(1, 3),
        rng.randint(0, 2),
        n_leaves,
        nodes,
        tuple(numbers(k=rng.randint(1, 3))),
        tuple(numbers(k=n_leaves)),
        cut,
    )


_rng = random.Random(0)
POOL = {n: [_draw(_rng, n) for _ in range(6)] for n in range(4)}
"""By how many leaves of state they have."""

SPECS = st.integers(0, 3).flatmap(lambda n: st.lists(st.sampled_from(POOL[n]), min_size=1, max_size=3))


class Real:
    """The `World` of CPU devices, for some of the functions."""

    launches_bit_by_bit = True

    def __init__(self, functions: Sequence[Function]) -> None:
        self.array = array
        self._of = {id(f.graph): f for f in functions}
        bad.clear()

    def poison(self, first: np.ndarray[Any, Any]) -> None:
        bad.add(int(first[0]))

    def is_poisoned(self, first: np.ndarray[Any, Any]) -> bool:
        return int(first[0]) in bad

    def is_fault(self, error: BaseException | None) -> bool:
        return isinstance(error, RuntimeError) and "poisoned" in str(error)

    def expected(self, graph: Graph, inputs: Sequence[Any], state: Sequence[Any] = ()) -> tuple[list[Any], list[Any]]:
        return self._of[id(graph)].expected(inputs, state)

    async def sleep(self, seconds: float) -> None:
        """Some time, so that devices get on; how far they get is theirs."""
        await asyncio.sleep(seconds / 4000)

    def hold(self, *, hold: bool) -> None:
        if hold:
            gate.clear()
        else:
            gate.set()
