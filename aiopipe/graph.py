"""Frozen graphs: tensors, nodes, and a builder.

No JAX here: tests and simulated devices build graphs by hand, and planning works on these
values alone. A graph is in topological order: a node reads only leaves and the outputs of
nodes before it.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from .errors import TensorError

__all__ = ["CHEAP_OPS", "VIEW_OPS", "Graph", "GraphBuilder", "Kind", "Node", "Op", "PerGraph", "Tensor"]

T = TypeVar("T")

VIEW_OPS = frozenset(
    {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "copy_p", "bitcast_convert_type"}
)
"""Ops whose result shows their first operand in another layout; they follow it to its backend."""

CHEAP_OPS = frozenset({"iota", "broadcast_in_dim", "convert_element_type", "full", "reshape", "squeeze", "expand_dims"})
"""Ops that cost so little that a consumer may repeat them instead of receiving a larger result."""


class Kind(enum.Enum):
    """Where a tensor's value comes from."""

    INPUT = "input"
    WEIGHT = "weight"
    STATE = "state"
    NODE = "node"


class Op(Protocol):
    """What a node computes.

    Called with the values of `Node.inputs` in order, it returns one value for each of
    `Node.outputs`. `signature()` identifies the computation: two nodes with equal signatures
    and equal operand types compute the same function.
    """

    def __call__(self, *inputs: Any) -> Sequence[Any]: ...

    def signature(self) -> Hashable: ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Tensor:
    """A value of a graph.

    Attributes:
        id: index in `Graph.tensors`; -1 for a tensor outside any graph.
        name: pytree path of a leaf or an output, else the name of the node's op and its index.
        shape: dimensions.
        dtype: name of the element type, e.g. ``"bfloat16"`` or ``"key<fry>"``.
        kind: where the value comes from.
        nbytes: size of the value in bytes.
        view_src: id of the tensor that this one is a view of, if any.
        source: for a weight, what the user gave: an array, or a tensor with buffers.
        buffers: the buffers that hold the value, one for each backend that has it.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    nbytes: int
    view_src: int | None = None
    source: Any = field(default=None, repr=False)
    buffers: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def given(self) -> Any:
        """What the user gave as a weight's value: `source`.

        Raises:
            TensorError: nothing; it was traced from a shape alone.
        """
        if self.source is None:
            raise TensorError(
                f"weight {self.describe()} has no value: it was traced from a jax.ShapeDtypeStruct; trace with "
                "arrays, or with tensors that are in a buffer and have been set"
            )
        return self.source

    def describe(self) -> str:
        """``name dtype[shape]``, as error messages show it."""
        return f"{self.name!r} {self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One operation of a graph.

    Attributes:
        index: position in `Graph.nodes`.
        op: name of the primitive, e.g. ``"dot_general"``.
        inputs: ids of the tensors that it reads, in order; literals are part of `fn`.
        outputs: ids of the tensors that it makes.
        fn: the computation itself.
        source: the user's source line, e.g. ``"model.py:12 (attention)"``.
        flops: estimated floating point operations.
        nbytes: estimated bytes read and written.
        has_effect: it does something besides its outputs; never dropped, moved or repeated.
    """

    index: int
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fn: Op = field(repr=False)
    source: str = ""
    flops: float = 0.0
    nbytes: float = 0.0
    has_effect: bool = False

    @property
    def name(self) -> str:
        """``op#index``."""
        return f"{self.op}#{self.index}"

    @property
    def is_view(self) -> bool:
        """Whether the result shows the first operand in another layout."""
        return self.op in VIEW_OPS and len(self.inputs) == 1 and not self.has_effect

    @property
    def is_cheap(self) -> bool:
        """Whether a consumer may repeat it instead of receiving its result."""
        return self.op in CHEAP_OPS and not self.has_effect


def _single(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Graph:
    """A function as a value: what it reads, what it computes, what it returns.

    Attributes:
        name: the function's name.
        tensors: every tensor; `Tensor.id` is the index here.
        nodes: the operations in topological order.
        inputs: tensors that a caller gives with each evaluation, in order.
        weights: tensors whose values stay the same.
        outputs: tensors that an evaluation returns, in the order of the flattened result.
        flatten_inputs: turns a call's arguments into values for `inputs`, or raises `TensorError`.
        unflatten_outputs: turns values of `outputs` into what the function returns.
        config: JAX settings in force when the function was traced, re-entered when it is compiled.
        attached: what `PerGraph` keeps; no part of the value.
    """

    name: str
    tensors: tuple[Tensor, ...] = field(repr=False)
    nodes: tuple[Node, ...] = field(repr=False)
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = field(repr=False)
    outputs: tuple[Tensor, ...]
    flatten_inputs: Callable[[tuple[Any, ...]], Sequence[Any]] = field(repr=False)
    unflatten_outputs: Callable[[Sequence[Any]], Any] = field(default=_single, repr=False)
    config: Any = field(default=None, repr=False)
    attached: dict[object, Any] = field(default_factory=dict, repr=False)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Inputs and weights."""
        return self.inputs + self.weights

    def with_buffers(self, buffers: Mapping[int, tuple[Any, ...]]) -> Graph:
        """The same graph with some weights (by tensor id) held in buffers instead of by their source."""
        tensors = list(self.tensors)
        for tid, held in buffers.items():
            tensors[tid] = replace(tensors[tid], source=None, buffers=held)

        def renewed(old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(tensors[t.id] for t in old)

        return replace(
            self,
            tensors=tuple(tensors),
            weights=renewed(self.weights),
            outputs=renewed(self.outputs),
            attached={},
        )

    def producers(self) -> list[int]:
        """For each tensor id the index of the node that makes it, or -1 for a leaf."""
        made_by = [-1] * len(self.tensors)
        for node in self.nodes:
            for out in node.outputs:
                made_by[out] = node.index
        return made_by


class PerGraph(Generic[T]):
    """Something for each graph that dies with the graph, even where it refers to it.

    (A `weakref.WeakKeyDictionary` would keep a graph alive whose value refers to it.)
    """

    def __init__(self) -> None:
        self._key = object()
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def get(self, graph: Graph) -> T | None:
        """What there is for a graph."""
        return graph.attached.get(self._key)

    def put(self, graph: Graph, value: T) -> None:
        """Keep a value for a graph."""
        graph.attached[self._key] = value
        self._graphs.add(graph)

    def drop(self, graph: Graph) -> None:
        """Forget a graph's value, if there is one."""
        graph.attached.pop(self._key, None)
        self._graphs.discard(graph)

    def values(self) -> list[T]:
        """The values of all graphs that are alive."""
        return [graph.attached[self._key] for graph in self._graphs]

    def __contains__(self, graph: Graph) -> bool:
        return self._key in graph.attached

    def clear(self) -> None:
        """Forget all."""
        for graph in list(self._graphs):
            self.drop(graph)


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
        config: Any = None,
    ) -> Graph:
        """Freeze the graph.

        Args:
            outputs: ids of the tensors that an evaluation returns.
            output_names: their names; a node's tensor that is an output takes the name of the first that it is.
            flatten_inputs: turns a call's arguments into values for the inputs; default: they are those values.
            unflatten_outputs: turns values of `outputs` into the result; default: the one value, or a tuple.
            config: JAX settings to compile under.
        """
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
            unflatten_outputs or _single,
            config,
        )

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
