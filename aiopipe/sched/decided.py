"""What is decided before the passes of `assign`: weights that are held, pins, state, and the cut of a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..devices.base import Device
from ..errors import PlacementError
from ..graph import Graph, Node, Tensor

__all__ = ["NONE", "Decided"]

NONE = -1
"""No backend yet, or: decides nothing."""


class Decided:
    """The lists that the passes of `assign` fill, and what its caller has put in them."""

    def __init__(self, graph: Graph, devices: Sequence[Device], op_offload: bool) -> None:
        n_nodes, n_tensors = len(graph.nodes), len(graph.tensors)
        self.graph = graph
        self.devices = devices
        self.last = len(devices) - 1
        self.op_offload = op_offload
        self.supports: list[Callable[[Node], bool]] = [device.supports_op for device in devices]
        self.made_by = graph.producers()
        self.is_view = [node.is_view for node in graph.nodes]
        self.backend = [NONE] * n_nodes
        self.cause = [""] * n_nodes
        self.lacking: set[int] = set()  # nodes whose weight, or cut, is on a backend that lacks their op
        self.refused: set[int] = set()  # nodes that an expansion passed over because the backend lacks their op
        self.floating: set[int] = set()  # nodes that nothing before them decides; they follow their consumer
        self.leaf_backends: list[tuple[int, ...]] = [()] * n_tensors
        self.leaf_cause = [""] * n_tensors
        self.holder = [NONE] * n_tensors  # backend of the weight that a tensor is, or comes from
        self.replicas: dict[int, tuple[int, ...]] = {}  # the same where several hold it

    def take_weights(self, weights: Mapping[int, tuple[int, ...]]) -> None:
        """Weights stay where they are held."""
        for tid, held in weights.items():
            if held:
                self.leaf_backends[tid] = tuple(dict.fromkeys(held))
                self.leaf_cause[tid] = "1.wgt"

    def take_pins(self, pins: Mapping[int, int]) -> None:
        """``usr``: a pin decides before everything else."""
        for tid, backend in pins.items():
            index = self.made_by[tid]
            if index < 0:
                self.leaf_backends[tid] = (backend,)
                self.leaf_cause[tid] = "usr"
                continue
            node = self.graph.nodes[index]
            if self.backend[index] not in (NONE, backend):
                raise PlacementError(
                    f"{self.graph.tensors[tid].describe()} is pinned to {self._name(backend)}, another output of "
                    f"{node.name} ({node.source}) to {self._name(self.backend[index])}: pin both to one backend"
                )
            if not self.supports[backend](node):
                able = [self._name(b) for b, supports in enumerate(self.supports) if supports(node)]
                raise PlacementError(
                    f"{self.graph.tensors[tid].describe()} is pinned to {self._name(backend)}, which lacks the op "
                    f"{node.op} of {node.name} ({node.source}); "
                    + (f"pin it to {' or '.join(able)}" if able else "no other backend has it either")
                )
            self.backend[index] = backend
            self.cause[index] = "usr"

    def take_state(self, homes: Mapping[int, int]) -> None:
        """``1.dst``: state stays where it is; so does what makes its next value, and what reads it.

        A view that is the next value takes its source along.
        """
        if not homes:
            return
        graph, backend = self.graph, self.backend
        for leaf, new in zip(graph.state, graph.new_state, strict=True):
            home = homes.get(leaf.id, NONE)
            if home < 0:
                continue
            if self.leaf_backends[leaf.id] not in ((), (home,)):
                raise PlacementError(
                    f"state {leaf.describe()} is on {self._name(home)}, but pinned to "
                    f"{self._name(self.leaf_backends[leaf.id][0])}: pin it before it is used, or not at all"
                )
            self.leaf_backends[leaf.id], self.leaf_cause[leaf.id] = (home,), self.leaf_cause[leaf.id] or "1.dst"
            maker = self.made_by[new.id]
            if maker >= 0:
                self._keep(graph.nodes[maker], home, leaf)
            while maker >= 0 and self.is_view[maker]:  # what it is a view of, unless that is decided
                maker = self.made_by[graph.nodes[maker].inputs[0]]
                if maker >= 0 and backend[maker] < 0 and self.supports[home](graph.nodes[maker]):
                    backend[maker], self.cause[maker] = home, "1.dst"
        for node in graph.nodes:
            for t in node.inputs:
                home = homes.get(t, NONE)
                if home >= 0 and backend[node.index] < 0 and self.supports[home](node):
                    backend[node.index], self.cause[node.index] = home, "1.dst"

    def _keep(self, node: Node, home: int, leaf: Tensor) -> None:
        """A node that makes a state's next value runs where the state is."""
        i = node.index
        if self.backend[i] not in (NONE, home):
            why = "is pinned to" if self.cause[i] == "usr" else "makes other state that is on"
            raise PlacementError(
                f"state {leaf.describe()} is on {self._name(home)}, but {node.name} ({node.source}), which makes its "
                f"next value, {why} {self._name(self.backend[i])}: keep them together"
            )
        if not self.supports[home](node):
            raise PlacementError(
                f"state {leaf.describe()} is on {self._name(home)}, which lacks the op {node.op} of {node.name} "
                f"({node.source}) that makes its next value: put the state on a backend that has it"
            )
        if self.backend[i] < 0:
            self.backend[i], self.cause[i] = home, "1.dst"

    def take_cut(self, cut: Sequence[int]) -> None:
        """``part``: the backends that `partition` chose."""
        for node, chosen in zip(self.graph.nodes, cut, strict=True):
            i = node.index
            if self.backend[i] >= 0:
                continue
            if self.supports[chosen](node):
                self.backend[i], self.cause[i] = chosen, "part"
            else:
                self.lacking.add(i)
        self.floating.clear()

    def _name(self, backend: int) -> str:
        return f"{self.devices[backend].name!r}"
