"""Frozen graphs: tensors and nodes.

No JAX here: tests and simulated devices build graphs by hand, and planning works on these
values alone. A graph is in topological order: a node reads only leaves and the outputs of
nodes before it.
"""

from __future__ import annotations

import enum
import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from .errors import TensorError

__all__ = ["CHEAP_OPS", "VIEW_OPS", "Graph", "Kind", "Node", "Op", "PerGraph", "Tensor", "single"]

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

    def valueless(self) -> Tensor:
        """The same without what the user gave and without buffers: for what outlives them."""
        return self if self.source is None and not self.buffers else replace(self, source=None, buffers=())

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


def single(values: Sequence[Any]) -> Any:
    """The one value, or a tuple of them: `Graph.unflatten_outputs` by default."""
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
        state: leaves that an evaluation takes from its `State`, in the order of the flattened state.
        new_state: for each of `state` the tensor that takes its place for the next evaluation: the leaf
            itself where it does not change, else a node's output that is no output of the graph and in
            nobody else's place.
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
    unflatten_outputs: Callable[[Sequence[Any]], Any] = field(default=single, repr=False)
    state: tuple[Tensor, ...] = field(default=(), repr=False)
    new_state: tuple[Tensor, ...] = field(default=(), repr=False)
    config: Any = field(default=None, repr=False)
    attached: dict[object, Any] = field(default_factory=dict, repr=False)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Inputs, weights and state."""
        return self.inputs + self.weights + self.state

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What an evaluation leaves behind: `outputs`, then the values of the state that have changed."""
        return self.outputs + tuple(t for t in self.new_state if t.kind is Kind.NODE)

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
