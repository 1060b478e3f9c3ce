"""Assignment: which backend computes each node, where each leaf lives, and why.

The passes and their causes are those of `ggml_backend_sched_split_graph` in ggml-backend.c
(passes 1 to 3; `3.best` and `3.upg` from its newer versions). Each is one walk over the nodes.
What differs: weights may be replicated or not placed yet, a value computed from weights alone
counts as the weight it came from, and inputs are no place, since their bytes go from the host
straight to whoever reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from ..devices.base import Device
from ..errors import PlacementError
from ..graph import Graph, Kind, Node
from .assign_check import check_arguments
from .decided import NONE, Decided

__all__ = ["Assignment", "assign"]

_WEIGHT, _NOTHING = 1, 2
"""What a constant is computed from."""


@cache
def _wgt(position: int) -> str:
    """The cause ``1.wgt<i>``: one string for each, not for each node."""
    return f"1.wgt{position}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where everything is, and why.

    Causes: ``usr`` pinned; ``part`` chosen by `partition`; ``1.vsrc`` a view beside its source;
    ``1.inp`` an input, on the host; ``1.dst`` state where it is, and a node that makes its next value or
    reads it; ``1.wgt`` a weight that a backend holds already;
    ``1.wgt<i>`` beside the weight that is operand i; ``1.off`` a large operation on a weight of the
    last backend, moved to an accelerator; ``2.1`` to ``2.4`` the expansions;
    ``3`` from the source, the consumer, or the first backend that can; ``3.best`` moved to the
    first backend that has the op; ``3.upg`` moved from the last backend to where its operands are.

    Attributes:
        node_backend: for each node the index of its backend.
        node_cause: for each node why.
        leaf_backends: for each tensor id the backends where that leaf lives (a replicated weight
            has several); empty for tensors that nodes make.
        leaf_cause: for each tensor id why; "" for tensors that nodes make.
    """

    node_backend: tuple[int, ...]
    node_cause: tuple[str, ...]
    leaf_backends: tuple[tuple[int, ...], ...]
    leaf_cause: tuple[str, ...]

    def backends_of(self, graph: Graph, tensor: int) -> tuple[int, ...]:
        """The backends where tensor id `tensor` lives or is made. Looks through the graph for a node's tensor."""
        node = _maker(graph, tensor)
        return self.leaf_backends[tensor] if node is None else (self.node_backend[node.index],)

    def cause_of(self, graph: Graph, tensor: int) -> str:
        """Why tensor id `tensor` is where it is. Looks through the graph for a node's tensor."""
        node = _maker(graph, tensor)
        return self.leaf_cause[tensor] if node is None else self.node_cause[node.index]


def assign(
    graph: Graph,
    devices: Sequence[Device],
    *,
    weights: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    pins: Mapping[int, int] = MappingProxyType({}),
    state: Mapping[int, int] = MappingProxyType({}),
    cut: Sequence[int] | None = None,
    op_offload: bool = False,
) -> Assignment:
    """Place every node and leaf of a graph.

    Args:
        graph: what to place; not changed.
        devices: in order of priority; the last is the host CPU, which does not spread.
        weights: tensor id -> backends that hold that weight already. A weight that is held by
            several does not decide where its nodes run; one that is not here (or held by none) is
            put beside its first consumer.
        pins: tensor id -> backend that the user wants it on.
        state: tensor id of a leaf of the state -> backend where it is. One that is not here goes where its
            next value is made.
        cut: for each node the backend chosen by `partition`, in place of passes 1 and 2.
        op_offload: an operation whose weight is on the last backend goes to the first other one that
            has it and says that it is worth it (`Device.offload_op`); the weight is copied there once.

    Raises:
        PlacementError: no backend has an op, a pin names one that lacks it, or an index is wrong.
    """
    if not devices:
        raise PlacementError("got no devices; expected at least one, the last of them a host CPU")
    check_arguments(graph, devices, weights, {**pins, **state}, cut)
    placing = _Placing(graph, devices, op_offload)
    placing.take_weights(weights)
    placing.take_pins(pins)
    placing.take_state({**{t.id: pins[t.id] for t in graph.state if t.id in pins}, **state})
    placing.trace_weights()
    if cut is not None:
        placing.take_cut(cut)
    else:
        placing.from_weights()
        placing.expand()
        if placing.replicas:
            placing.from_replicas()
            placing.expand()
    placing.settle()
    if placing.floating:
        placing.follow_consumers()
    placing.place_leaves()
    leaves = tuple(placing.leaf_backends), tuple(placing.leaf_cause)
    return Assignment(tuple(placing.backend), tuple(placing.cause), *leaves)


class _Placing(Decided):
    """The passes; every method is one."""

    # -- pass 1 --------------------------------------------------------------------------------

    def trace_weights(self) -> None:
        """Follow weights through what is computed from them alone; find the nodes that float.

        A node that reads nothing but weights that decide nothing (replicated, or not placed yet),
        and a view of an input, could be anywhere: it is best where its result is read.
        """
        tensors, backend, is_view = self.graph.tensors, self.backend, self.is_view
        constant = bytearray(len(tensors))
        shows_input = {tensor.id for tensor in self.graph.inputs}
        held_by, holder = self.leaf_backends, self.holder
        for tensor in self.graph.weights:
            tid = tensor.id
            constant[tid] = _WEIGHT
            held = held_by[tid]
            if len(held) == 1:
                holder[tid] = held[0]
            elif held:
                self.replicas[tid] = held
        for node in self.graph.nodes:
            i, inputs = node.index, node.inputs
            for t in inputs:
                if not constant[t]:
                    break
            else:
                if not node.has_effect:
                    self._trace_constant(node, constant)
                continue
            if is_view[i] and inputs[0] in shows_input and backend[i] < 0:
                shows_input.update(node.outputs)
                self.floating.add(i)

    def _trace_constant(self, node: Node, constant: bytearray) -> None:
        """A node that reads only constants: what it makes counts as the weight that decides for it."""
        real = [t for t in node.inputs if constant[t] == _WEIGHT]
        decides, held = self.backend[node.index], None  # a pin
        if decides < 0:
            decides = next((self.holder[t] for t in real if self.holder[t] >= 0), NONE)
            held = next((self.replicas[t] for t in real if t in self.replicas), None)
        for out in node.outputs:
            constant[out] = _WEIGHT if real else _NOTHING
            if real:
                self.holder[out] = decides
            if held is not None:
                self.replicas[out] = held
        if real and decides < 0:
            self.floating.add(node.index)

    def from_weights(self) -> None:
        """Pass 1: views beside their source (``1.vsrc``), nodes beside their first weight (``1.wgt<i>``)."""
        backend, cause, holder = self.backend, self.cause, self.holder
        for node in self.graph.nodes:
            i, inputs = node.index, node.inputs
            if backend[i] >= 0:
                continue
            if self.is_view[i]:
                source = self.made_by[inputs[0]]
                wanted, why = backend[source] if source >= 0 else holder[inputs[0]], "1.vsrc"
            else:
                wanted, why = NONE, ""
                for position, t in enumerate(inputs):
                    if holder[t] >= 0:
                        wanted, why = holder[t], _wgt(position)
                        if wanted == self.last and self.op_offload:
                            wanted, why = self._offloaded(node, why)
                        break
            if wanted < 0:
                continue
            if self.supports[wanted](node):
                backend[i], cause[i] = wanted, why
            else:
                self.lacking.add(i)

    def _offloaded(self, node: Node, why: str) -> tuple[int, str]:
        """``1.off``: the first other backend that has the op and wants it, although its weight is on the last."""
        for b, device in enumerate(self.devices[: self.last]):
            if self.supports[b](node) and device.offload_op(node):
                return b, "1.off"
        return self.last, why

    # -- pass 2 --------------------------------------------------------------------------------

    def expand(self) -> None:
        """Pass 2: unassigned nodes join their neighbours; first the accelerators spread, then the rest."""
        apart = self.floating | self.lacking
        down = [i for i, view in enumerate(self.is_view) if not view and i not in apart]
        up = down[::-1]
        self._spread(down, "2.2", stop_at=self.last)
        self._spread(up, "2.1", stop_at=self.last)
        self._spread(down, "2.4", stop_at=NONE)
        self._spread(up, "2.3", stop_at=NONE)

    def _spread(self, order: list[int], why: str, *, stop_at: int) -> None:
        """Carry the newest backend along `order`; a node on `stop_at` clears the carry."""
        backend, cause, supports, nodes = self.backend, self.cause, self.supports, self.graph.nodes
        carried = NONE
        for i in order:
            here = backend[i]
            if here >= 0:
                carried = NONE if here == stop_at else here
            elif carried >= 0:
                if supports[carried](nodes[i]):
                    backend[i], cause[i] = carried, why
                else:
                    self.refused.add(i)

    def from_replicas(self) -> None:
        """Where nothing has decided, replicated weights do: the best holder that has the op."""
        undecidable = self.floating | self.lacking | self.refused
        for node in self.graph.nodes:
            i = node.index
            if self.backend[i] >= 0 or self.is_view[i] or i in undecidable:
                continue
            for position, t in enumerate(node.inputs):
                able = [b for b in sorted(self.replicas.get(t, ())) if self.supports[b](node)]
                if able:
                    self.backend[i], self.cause[i] = able[0], _wgt(position)
                    break

    # -- pass 3 --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Pass 3 for nodes: views from their source, unsupported ones to the first backend that can, upgrades."""
        backend, cause, last = self.backend, self.cause, self.last
        for node in self.graph.nodes:
            i = node.index
            if backend[i] == last and (cause[i] == "2.3" or cause[i] == "2.4"):
                better = self._where_operands_are(node)
                if 0 <= better < last and self.supports[better](node):
                    backend[i], cause[i] = better, "3.upg"
            if backend[i] >= 0 or i in self.floating:
                continue
            source = self.made_by[node.inputs[0]] if self.is_view[i] else NONE
            if source >= 0 and self.supports[backend[source]](node):
                backend[i], cause[i] = backend[source], "3"
                continue
            backend[i] = self._first_able(node)
            moved = backend[i] > 0 or source >= 0 or i in self.lacking or i in self.refused
            cause[i] = "3.best" if moved else "3"

    def _where_operands_are(self, node: Node) -> int:
        """The one backend where all operands are that have a place, or -1."""
        found = NONE
        for t in node.inputs:
            source = self.made_by[t]
            held = self.leaf_backends[t] if source < 0 else (self.backend[source],)
            if not held or held[0] < 0 or len(held) > 1:
                continue
            if found >= 0 and held[0] != found:
                return NONE
            found = held[0]
        return found

    def follow_consumers(self) -> None:
        """Pass 3 for floating nodes: from their first consumer, else a holder of their weight, else anywhere."""
        consumer: dict[int, int] = {}
        for node in reversed(self.graph.nodes):
            i = node.index
            if i in self.floating:
                self._land(node, consumer.get(i, NONE))
            for t in node.inputs:
                source = self.made_by[t]
                if source in self.floating:
                    consumer[source] = self.backend[i]  # going backwards, the first consumer comes last

    def _land(self, node: Node, consumer: int) -> None:
        i = node.index
        if consumer >= 0 and self.supports[consumer](node):
            self.backend[i], self.cause[i] = consumer, "3"
            return
        for position, t in enumerate(node.inputs):
            for b in sorted(self.replicas.get(t, ())):
                if self.supports[b](node):
                    self.backend[i], self.cause[i] = b, "1.vsrc" if self.is_view[i] else _wgt(position)
                    return
        self.backend[i] = self._first_able(node)
        self.cause[i] = "3" if consumer == NONE and self.backend[i] == 0 else "3.best"

    def place_leaves(self) -> None:
        """``1.inp`` for inputs; weights that nobody holds go beside their first consumer, state its maker (``3``)."""
        backends, cause = self.leaf_backends, self.leaf_cause
        places = [(b,) for b in range(len(self.devices))]
        for tensor in self.graph.inputs:
            if not backends[tensor.id]:
                backends[tensor.id], cause[tensor.id] = places[self.last], "1.inp"
        for leaf, new in zip(self.graph.state, self.graph.new_state, strict=True):
            if not backends[leaf.id] and self.made_by[new.id] >= 0:
                backends[leaf.id], cause[leaf.id] = places[self.backend[self.made_by[new.id]]], "3"
        left = {tensor.id for tensor in self.graph.weights + self.graph.state if not backends[tensor.id]}
        if not left:
            return
        for node in self.graph.nodes:
            for t in node.inputs:
                if t in left and not backends[t]:
                    backends[t], cause[t] = places[self.backend[node.index]], "3"
        for t in left:
            if not backends[t]:  # nobody reads it
                backends[t], cause[t] = places[self.last], "3"

    # -- helpers -------------------------------------------------------------------------------

    def _first_able(self, node: Node) -> int:
        for b, supports in enumerate(self.supports):
            if supports(node):
                return b
        made = ", ".join(self.graph.tensors[t].describe() for t in node.outputs) or "nothing"
        raise PlacementError(
            f"no backend has the op {node.op} of {node.name} ({node.source}), which makes {made}; asked "
            f"{', '.join(self._name(b) for b in range(len(self.devices)))}: add a device that has it"
        )


def _maker(graph: Graph, tensor: int) -> Node | None:
    if graph.tensors[tensor].kind is not Kind.NODE:
        return None
    return next(node for node in graph.nodes if tensor in node.outputs)
