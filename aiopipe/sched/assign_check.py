"""What `assign` is told is checked before anything is decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..devices.base import Device
from ..errors import PlacementError
from ..graph import Graph, Kind

__all__ = ["check_arguments"]


def check_arguments(
    graph: Graph,
    devices: Sequence[Device],
    weights: Mapping[int, tuple[int, ...]],
    pins: Mapping[int, int],
    cut: Sequence[int] | None,
) -> None:
    """Refuse indices that name no tensor or no backend.

    Args:
        graph: what is placed.
        devices: what the indices count.
        weights: tensor id -> backends that hold that weight.
        pins: tensor id -> backend.
        cut: a backend for each node, or None.

    Raises:
        PlacementError: names the tensor, and what was expected.
    """
    tensors, last = graph.tensors, len(devices) - 1

    def unknown(backend: int, what: str) -> PlacementError:
        return PlacementError(f"{what} names backend {backend}, expected 0 to {last}: an index of the devices")

    for tid in (*weights, *pins):
        if not 0 <= tid < len(tensors):
            raise PlacementError(
                f"weights or pins name tensor {tid}, expected 0 to {len(tensors) - 1} (graph {graph.name!r})"
            )
    given, made = Kind.INPUT, Kind.NODE
    for tid, held in weights.items():
        kind = tensors[tid].kind
        if kind is given or kind is made:
            raise PlacementError(f"weights name {tensors[tid].describe()}, which is of kind {kind.value!r}: pin it")
        for backend in held:
            if not 0 <= backend <= last:
                raise unknown(backend, tensors[tid].describe())
    for tid, backend in pins.items():
        if not 0 <= backend <= last:
            raise unknown(backend, f"the pin of {tensors[tid].describe()}")
    if cut is not None and len(cut) != len(graph.nodes):
        raise PlacementError(f"the cut has {len(cut)} backends, expected one for each of {len(graph.nodes)} nodes")
    for backend in set(cut or ()):
        if not 0 <= backend <= last:
            raise unknown(backend, "the cut")
