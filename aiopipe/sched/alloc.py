"""Sizes and donation: what each backend must hold, and which memory outputs may take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..devices.base import DeviceProps, MemoryStats
from ..errors import AllocationError
from ..graph import Graph
from .split import HOST, Split

__all__ = ["BackendSize", "backend_sizes", "check_memory", "donations"]


@dataclass(frozen=True, slots=True)
class BackendSize:
    """Bytes that one backend holds for a plan.

    Attributes:
        weights_nbytes: weights, held once.
        copy_nbytes: for each of the `n_copies` slots: inputs, copies from other backends, and
            what its splits return.
        temp_nbytes: the largest scratch that one of its executables needs (0 before compiling).
    """

    weights_nbytes: int = 0
    copy_nbytes: int = 0
    temp_nbytes: int = 0

    def total(self, n_copies: int) -> int:
        """Bytes with `n_copies` slots."""
        return self.weights_nbytes + n_copies * self.copy_nbytes + self.temp_nbytes


def donations(graph: Graph, splits: Sequence[Split], props: Sequence[DeviceProps]) -> tuple[tuple[int, ...], ...]:
    """For each split the positions of the inputs that its outputs may take over.

    Only copies that the scheduler itself made from another backend, in the last split that reads
    them there, each matched with an output of its own shape and dtype. A user's input is never
    donated (it may be the user's own array), nor a value that may be a view of its producer's
    memory (`DeviceProps.view_nbytes`).
    """
    last_reader: dict[tuple[int, int], int] = {}
    copied: set[tuple[int, int]] = set()
    for split in splits:
        for t in split.inputs:
            last_reader[t, split.backend] = split.index
        copied.update((c.tensor, split.backend) for c in split.copies if c.src != HOST)
    tensors = graph.tensors
    result: list[tuple[int, ...]] = []
    for split in splits:
        view_nbytes = props[split.backend].view_nbytes
        own = [
            position
            for position, t in enumerate(split.inputs)
            if (t, split.backend) in copied
            and last_reader[t, split.backend] == split.index
            and tensors[t].nbytes > view_nbytes
        ]
        if not own:
            result.append(())
            continue
        free = Counter((tensors[t].shape, tensors[t].dtype) for t in split.outputs)
        donated = []
        for position in own:
            tensor = tensors[split.inputs[position]]
            kind = (tensor.shape, tensor.dtype)
            if free[kind] > 0:
                free[kind] -= 1
                donated.append(position)
        result.append(tuple(donated))
    return tuple(result)


def backend_sizes(
    graph: Graph,
    splits: Sequence[Split],
    n_backends: int,
    *,
    weights: Sequence[frozenset[int]],
    memory: Sequence[MemoryStats] = (),
) -> tuple[BackendSize, ...]:
    """The size of a plan on each backend.

    Args:
        graph: what is evaluated.
        splits: from `split_graph`.
        n_backends: how many backends there are.
        weights: for each backend the ids of the weights that it holds.
        memory: for each split what its executable needs; empty before compiling.
    """
    held = [0] * n_backends
    temp = [0] * n_backends
    for split in splits:
        outputs = sum(graph.tensors[t].nbytes for t in split.outputs)
        held[split.backend] += outputs + sum(c.nbytes for c in split.copies)
    for split, stats in zip(splits, memory, strict=False):
        temp[split.backend] = max(temp[split.backend], stats.temp_nbytes)
    return tuple(
        BackendSize(sum(graph.tensors[t].nbytes for t in weights[b]), held[b], temp[b]) for b in range(n_backends)
    )


def check_memory(
    sizes: Sequence[BackendSize], names: Sequence[str], limits: Sequence[int | None], n_copies: int
) -> None:
    """Refuse a plan that does not fit, before anything is allocated.

    Raises:
        AllocationError: names the backend, the bytes, and the largest `n_copies` that would fit.
    """
    for size, name, limit in zip(sizes, names, limits, strict=True):
        asked = size.total(n_copies)
        if limit is None or asked <= limit:
            continue
        room = limit - size.weights_nbytes - size.temp_nbytes
        fits = room // size.copy_nbytes if size.copy_nbytes else 0
        todo = f"n_copies={fits} would fit" if fits >= 1 else "move weights to another device, or use smaller batches"
        raise AllocationError(
            f"backend {name!r} needs {asked} bytes (weights {size.weights_nbytes}, temporaries {size.temp_nbytes}, "
            f"{n_copies} copies of {size.copy_nbytes}), but may use {limit}: {todo}",
            backend=name,
            asked_nbytes=asked,
            available_nbytes=limit,
        )
