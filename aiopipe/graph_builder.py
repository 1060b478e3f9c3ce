"""`GraphBuilder`: graphs node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .errors import TensorError
from .graph import VIEW_OPS, Graph, Kind, Node, Op, Tensor, single

__all__ = ["GraphBuilder"]


class GraphBuilder:
    """Builds a `Graph` node by node.

    Used by the tracer, and by hand where no JAX function is wanted:

        b = GraphBuilder("two")
        x = b.input("x", (4,), "float32", 16)
        w = b.weight("w", (4,), "float32", 16, source=array)
        y = b.node("mul", [x, w], [((4,), "float32", 16)], fn=op)[0]
        graph = b.build([y])
    """

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self._tensors: list[Tensor] = []
        self._nodes: list[Node] = []
        self._inputs: list[int] = []
        self._weights: list[int] = []
        self._state: list[int] = []

    def input(self, name: str, shape: Sequence[int], dtype: str, nbytes: int) -> int:
        """Add an input; return its tensor id.

        Args:
            name: for messages.
            shape: its dimensions.
            dtype: name of its element type.
            nbytes: size of a value, in bytes.
        """
        tid = self._add(name, shape, dtype, nbytes, Kind.INPUT)
        self._inputs.append(tid)
        return tid

    def weight(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        nbytes: int,
        *,
        source: Any = None,
        buffers: tuple[Any, ...] = (),
    ) -> int:
        """Add a weight; return its tensor id.

        Args:
            name: for messages, and for placing it by name.
            shape: its dimensions.
            dtype: name of its element type.
            nbytes: size of its value, in bytes.
            source: its value: an array.
            buffers: the buffers that hold its value, instead of `source`.
        """
        tid = self._add(name, shape, dtype, nbytes, Kind.WEIGHT, source=source, buffers=buffers)
        self._weights.append(tid)
        return tid

    def state(self, name: str, shape: Sequence[int], dtype: str, nbytes: int) -> int:
        """Add a leaf of the state; return its tensor id. `build` is told what takes its place.

        Args:
            name: for messages.
            shape: its dimensions.
            dtype: name of its element type.
            nbytes: size of its value, in bytes.
        """
        tid = self._add(name, shape, dtype, nbytes, Kind.STATE)
        self._state.append(tid)
        return tid

    def node(
        self,
        op: str,
        inputs: Sequence[int],
        outputs: Iterable[tuple[Sequence[int], str, int]],
        *,
        fn: Op,
        source: str = "",
        flops: float = 0.0,
        nbytes: float | None = None,
        has_effect: bool = False,
    ) -> list[int]:
        """Add a node that makes one tensor for each ``(shape, dtype, nbytes)``; return their ids.

        Args:
            op: name of the operation; a view's or a cheap one's has consequences (`Node.is_view`, `Node.is_cheap`).
            inputs: ids of the tensors that it reads.
            outputs: what it makes: dimensions, name of the element type, bytes.
            fn: what it computes: called with the values of `inputs`, it returns one for each of `outputs`.
            source: the user's source line.
            flops: estimated floating point operations.
            nbytes: estimated bytes read and written; default: those of `inputs` and `outputs`.
            has_effect: it does something besides its outputs; never dropped, moved or repeated.
        """
        index = len(self._nodes)
        view_src = inputs[0] if op in VIEW_OPS and len(inputs) == 1 and not has_effect else None
        specs = list(outputs)
        outs: list[int] = []
        for i, (shape, dtype, size) in enumerate(specs):
            name = f"{op}#{index}" if len(specs) == 1 else f"{op}#{index}.{i}"
            outs.append(self._add(name, shape, dtype, size, Kind.NODE, view_src=view_src))
        if nbytes is None:
            nbytes = sum(self._tensors[t].nbytes for t in inputs) + sum(self._tensors[t].nbytes for t in outs)
        self._nodes.append(
            Node(index, op, tuple(inputs), tuple(outs), fn, source, flops, nbytes, has_effect)
        )
        return outs

    def build(
        self,
        outputs: Sequence[int],
        *,
        output_names: Sequence[str] | None = None,
        flatten_inputs: Callable[[tuple[Any, ...]], Sequence[Any]] | None = None,
        unflatten_outputs: Callable[[Sequence[Any]], Any] | None = None,
        new_state: Sequence[int] = (),
        config: Any = None,
    ) -> Graph:
        """Freeze the graph.

        Args:
            outputs: ids of the tensors that an evaluation returns.
            output_names: their names; a node's tensor that is an output takes the name of the first that it is.
            flatten_inputs: turns a call's arguments into values for the inputs; default: they are those values.
            unflatten_outputs: turns values of `outputs` into the result; default: the one value, or a tuple.
            new_state: for each leaf of the state, in order, the id of the tensor that takes its place.
            config: JAX settings to compile under.

        Raises:
            TensorError: a tensor cannot take the place of a leaf of the state.
        """
        self._check_state(outputs, new_state)
        tensors = self._tensors
        if output_names is not None:
            named: set[int] = set()
            for tid, name in zip(outputs, output_names, strict=True):
                t = tensors[tid]
                if t.kind is Kind.NODE and tid not in named:
                    named.add(tid)
                    tensors[tid] = replace(t, name=name)
        n_inputs = len(self._inputs)

        def flatten(args: tuple[Any, ...]) -> Sequence[Any]:
            if len(args) != n_inputs:
                raise TensorError(f"graph {self.name!r} got {len(args)} inputs, expected {n_inputs}")
            return args

        return Graph(
            self.name,
            tuple(tensors),
            tuple(self._nodes),
            tuple(tensors[t] for t in self._inputs),
            tuple(tensors[t] for t in self._weights),
            tuple(tensors[t] for t in outputs),
            flatten_inputs or flatten,
            unflatten_outputs or single,
            tuple(tensors[t] for t in self._state),
            tuple(tensors[t] for t in new_state),
            config,
        )

    def _check_state(self, outputs: Sequence[int], new_state: Sequence[int]) -> None:
        """The state's memory is taken over by its next value: nobody else may hold either."""
        if len(new_state) != len(self._state):
            raise TensorError(
                f"graph {self.name!r} got {len(new_state)} new values for a state of {len(self._state)} leaves: "
                "give one for each, the leaf itself where it does not change"
            )
        taken = set(outputs)
        for leaf, new in zip(self._state, new_state, strict=True):
            old, value = self._tensors[leaf], self._tensors[new]
            if (value.shape, value.dtype) != (old.shape, old.dtype):
                raise TensorError(f"{value.describe()} cannot replace state {old.describe()}: it has another type")
            if (new != leaf and value.kind is not Kind.NODE) or new in taken:
                raise TensorError(
                    f"{value.describe()} cannot replace state {old.describe()}: it has to be made by a node, for this "
                    "leaf alone and not also as an output; add a node that copies it"
                )
            taken.add(new)

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str,
        nbytes: int,
        kind: Kind,
        *,
        view_src: int | None = None,
        source: Any = None,
        buffers: tuple[Any, ...] = (),
    ) -> int:
        tid = len(self._tensors)
        self._tensors.append(Tensor(tid, name, tuple(shape), dtype, kind, nbytes, view_src, source, buffers))
        return tid
