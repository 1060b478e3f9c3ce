"""Automatic placement: contiguous cuts of the node order, one piece for each device.

ggml leaves this to its callers (llama.cpp's ``--tensor-split`` cuts layers by ratios). Here the cuts
are found: a search over the slowest device's time (how many nodes can each device take in that time,
in order?), then a dynamic program over the cuts near the balanced ones for those that move the
fewest bytes.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..devices.base import Device, DeviceProps
from ..errors import PlacementError
from ..graph import Graph, Kind, Node

__all__ = ["Partition", "estimate_seconds", "partition"]

_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]

SLACK = 0.05
"""How much slower than the best the slowest device may get for cuts that move fewer bytes."""

MAX_INTENSITIES = 32
"""Devices' ratios of flops to bandwidth are rounded to this many, where there are more."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A placement of a graph's nodes and weights.

    Attributes:
        node_backend: for each node the index of its device; `assign` takes it as `cut`.
        weights: tensor id of each weight (and state) that is read -> the devices that read it, ascending.
        seconds: for each device the estimated time of its nodes.
        weight_nbytes: for each device the bytes of the weights that it reads.
    """

    node_backend: tuple[int, ...]
    weights: Mapping[int, tuple[int, ...]]
    seconds: tuple[float, ...]
    weight_nbytes: tuple[int, ...]


def estimate_seconds(node: Node, props: DeviceProps) -> float:
    """Roofline estimate: the longer of computing and of reading and writing; nothing for a view."""
    if node.is_view:
        return 0.0
    return max(node.flops / props.flops_per_s, node.nbytes / props.bytes_per_s)


def partition(
    graph: Graph,
    devices: Sequence[Device],
    *,
    ratios: Sequence[float] | None = None,
    memory: Sequence[int | None] | None = None,
) -> Partition:
    """Cut a graph into one contiguous piece for each device.

    Values computed from weights alone count as standing right before their first reader, wherever the
    graph has them, so that the weights of a model that casts them all at the start are spread, too.

    Args:
        graph: what to place. Ops that a device lacks are left for `assign` to move.
        devices: in order; they may differ in speed.
        ratios: share of the estimated time for each device. Without it the slowest device is made as
            fast as possible; cuts may cost `SLACK` of that where it saves moved bytes.
        memory: bytes for weights on each device, None for no limit; without it, what the devices report.

    Raises:
        PlacementError: the ratios are no shares, or the weights do not fit.
    """
    if not devices:
        raise PlacementError("got no devices to place a graph on; expected at least one")
    if memory is None:
        memory = [device.props.memory_nbytes for device in devices]
    for what, values in (("memory limits", memory), ("ratios", ratios)):
        if values is not None and len(values) != len(devices):
            raise PlacementError(f"got {len(values)} {what}, expected {len(devices)}: one for each device")
    work = _Work(graph, [device.props for device in devices], memory)
    cuts = work.cheapest(work.balanced(devices)) if ratios is None else _by_ratios(work, ratios)
    return _finish(graph, devices, work, cuts)


class _Work:
    """A graph as columns: for each position of the node order its time, bytes crossing, and weights.

    Cut c is before the node at position c; a device's piece lies between two cuts.
    """

    def __init__(self, graph: Graph, props: Sequence[DeviceProps], memory: Sequence[int | None]) -> None:
        self.n = len(graph.nodes)
        self.order = _order(graph)
        self.crossing = _crossing(graph, self.order)
        views = np.fromiter((not node.is_view for node in graph.nodes), np.float64, self.n)[self.order]
        flops = np.fromiter((node.flops for node in graph.nodes), np.float64, self.n)[self.order] * views
        moved = np.fromiter((node.nbytes for node in graph.nodes), np.float64, self.n)[self.order] * views
        self.speed = [p.flops_per_s for p in props]
        intensity = _round_to_few([p.flops_per_s / p.bytes_per_s for p in props])
        totals = {r: np.concatenate(([0.0], np.cumsum(np.maximum(flops, moved * r)))) for r in set(intensity)}
        lists = {r: total.tolist() for r, total in totals.items()}
        self.total: list[_Floats] = [totals[r] for r in intensity]  # work before each cut, in flops, by device
        self.total_list: list[list[float]] = [lists[r] for r in intensity]  # the same, for bisect
        self.reads = _Reads(graph, self.order)
        everything = self.reads.nbytes_between(0, self.n)
        self.memory = [limit if limit is not None and limit < everything else None for limit in memory]

    def seconds(self, device: int, begin: int, end: int) -> float:
        """Time of a piece."""
        total = self.total_list[device]
        return (total[end] - total[begin]) / self.speed[device]

    def furthest(self, device: int, begin: int, seconds: float) -> int:
        """The last cut up to which a device gets from `begin` in the time and the memory."""
        total = self.total_list[device]
        reach = total[begin] + seconds * self.speed[device]
        end = bisect.bisect_right(total, reach + 1e-12 * total[-1], begin) - 1
        limit = self.memory[device]
        return end if limit is None else self.reads.furthest(begin, end, limit)

    def pack(self, seconds: float) -> list[int] | None:
        """Cuts where each device, in order, takes all it can; None if nodes are left over."""
        cuts = [0]
        for device in range(len(self.speed)):
            cuts.append(self.furthest(device, cuts[-1], seconds))
        return cuts if cuts[-1] == self.n else None

    def slowest(self, cuts: Sequence[int]) -> float:
        """The longest time of a device."""
        return max(self.seconds(i, begin, end) for i, (begin, end) in enumerate(itertools.pairwise(cuts)))

    def balanced(self, devices: Sequence[Device]) -> list[int]:
        """Cuts with the smallest possible longest time: a search over that time."""
        best = self.pack(math.inf)
        if best is None:
            available = ", ".join(f"{d.name!r} {limit}" for d, limit in zip(devices, self.memory, strict=True))
            raise PlacementError(
                f"the weights need {self.reads.nbytes_between(0, self.n)} bytes and do not fit in the graph's order; "
                f"available: {available}: add devices, raise the memory limit, or use smaller weights (bfloat16)"
            )
        low, high = 0.0, self.slowest(best)
        while high - low > 1e-7 * high:
            middle = (low + high) / 2
            cuts = self.pack(middle)
            if cuts is None:
                low = middle
            else:
                best, high = cuts, min(middle, self.slowest(cuts))
        return best

    def cheapest(self, cuts: Sequence[int]) -> list[int]:
        """Cuts near the given ones that move the fewest bytes and are at most `SLACK` slower.

        `costs[i][c - first[i]]` is the fewest bytes crossing the cuts of devices before i, when device i
        begins at cut c. Windows as wide as a few devices' shares keep the whole linear in the graph.
        """
        allowed = self.slowest(cuts) * (1 + SLACK)
        reach = 64 + 2 * (self.n // len(self.speed))
        first = [max(0, c - reach) for c in cuts]
        last = [min(self.n, c + reach) for c in cuts]
        first[0] = last[0] = 0
        first[-1] = last[-1] = self.n
        costs = [np.zeros(1)]
        lows = []
        for device in range(len(self.speed)):
            lows.append(self._earliest(device, first, last, allowed))
            costs.append(self._advance(device, first, last, lows[-1], costs[-1]))
        found = [self.n]
        for device in reversed(range(len(self.speed))):
            found.append(self._step_back(device, found[-1], first, last, lows[device], costs[device], cuts[device]))
        return found[::-1]

    def _earliest(self, device: int, first: list[int], last: list[int], allowed: float) -> _Ints:
        """For each cut where the device may end, the earliest cut from which it gets there."""
        total = self.total[device]
        ends = total[first[device + 1] : last[device + 1] + 1]
        begins = total[first[device] : last[device] + 1]
        reach = allowed * self.speed[device]
        low: _Ints = first[device] + np.searchsorted(begins, ends - reach - 1e-12 * total[-1])
        limit = self.memory[device]
        if limit is not None:
            earliest = self.reads.earliest(first[device], first[device + 1], last[device + 1], limit)
            low = np.maximum(low, np.array(earliest, np.int64))
        return low

    def _advance(self, device: int, first: list[int], last: list[int], low: _Ints, costs: _Floats) -> _Floats:
        """From costs of where the device begins to costs of where it ends."""
        ends = np.arange(first[device + 1], last[device + 1] + 1)
        crossing = self.crossing[ends]
        lo, hi = low - first[device], np.minimum(ends - 1, last[device]) - first[device]
        result = _least(costs, lo, hi) + crossing
        stay = ends[(ends >= first[device]) & (ends <= last[device])]  # an empty piece: no further cut
        np.minimum.at(result, stay - first[device + 1], costs[stay - first[device]])
        return result

    def _step_back(
        self, device: int, end: int, first: list[int], last: list[int], low: _Ints, costs: _Floats, near: int
    ) -> int:
        """Where the device begins, on the cheapest way to `end`; of equals, the cut nearest to `near`."""
        begin = int(low[end - first[device + 1]])
        options = np.arange(begin, min(end, last[device]) + 1)
        price = costs[options - first[device]].copy()
        if len(options) and options[-1] == end:
            price[-1] -= self.crossing[end]
        best = options[price <= price.min()]
        return int(best[np.argmin(np.abs(best - near))])


class _Reads:
    """Which weights (and state, which needs room as they do) are read where: one entry for each read, ascending."""

    def __init__(self, graph: Graph, order: _Ints) -> None:
        is_weight = bytearray(tensor.kind in (Kind.WEIGHT, Kind.STATE) for tensor in graph.tensors)
        at: list[int] = []
        weight: list[int] = []
        for position, i in enumerate(order.tolist()):
            for t in graph.nodes[i].inputs:
                if is_weight[t]:
                    at.append(position)
                    weight.append(t)
        self.at = np.array(at, np.int64)
        self.weight = np.array(weight, np.int64)
        self.nbytes = np.array([graph.tensors[t].nbytes for t in weight], np.int64)
        self.before = np.full(len(at), -1, np.int64)  # position of the weight's read before this one
        self.after = np.full(len(at), len(order), np.int64)  # and of the next
        by_weight = np.argsort(self.weight, kind="stable")
        same = np.flatnonzero(self.weight[by_weight][1:] == self.weight[by_weight][:-1])
        self.before[by_weight[same + 1]] = self.at[by_weight[same]]
        self.after[by_weight[same]] = self.at[by_weight[same + 1]]
        self.index = np.searchsorted(self.at, np.arange(len(order) + 1)).tolist()  # of the first read at a position

    def nbytes_between(self, begin: int, end: int) -> int:
        """Bytes of the weights that a piece reads, each counted once."""
        piece = slice(self.index[begin], self.index[end])
        return int(self.nbytes[piece][self.before[piece] < begin].sum())

    def furthest(self, begin: int, end: int, limit: int) -> int:
        """The last cut up to `end` where a piece from `begin` still has at most `limit` bytes of weights."""
        k, stop, step, total = self.index[begin], self.index[end], 256, 0
        while k < stop:
            piece = slice(k, min(stop, k + step))
            sums = total + np.cumsum(np.where(self.before[piece] < begin, self.nbytes[piece], 0))
            if sums[-1] > limit:
                return int(self.at[k + int(np.searchsorted(sums, limit, "right"))])
            total, k, step = int(sums[-1]), piece.stop, step * 2
        return end

    def earliest(self, begin: int, first_end: int, last_end: int, limit: int) -> list[int]:
        """For each cut from `first_end` to `last_end` the earliest cut, from `begin` on, that the limit allows."""
        found = [begin] * (min(begin, last_end + 1) - first_end)
        nbytes, before, after = self.nbytes, self.before, self.after
        end = max(begin, first_end)
        total = self.nbytes_between(begin, end) if end <= last_end else 0
        while end <= last_end:
            while total > limit:
                for k in range(self.index[begin], self.index[begin + 1]):
                    if after[k] >= end:
                        total -= int(nbytes[k])
                begin += 1
            found.append(begin)
            for k in range(self.index[end], self.index[end + 1]) if end < last_end else ():
                if before[k] < begin:
                    total += int(nbytes[k])
            end += 1
        return found


def _order(graph: Graph) -> _Ints:
    """Node indices in the order to cut: the graph's, but constants stand right before their first reader."""
    n, made_by = len(graph.nodes), graph.producers()
    constant = bytearray(tensor.kind is Kind.WEIGHT for tensor in graph.tensors)
    floats = bytearray(n)
    for node in graph.nodes:
        for t in node.inputs:
            if not constant[t]:
                break
        else:
            floats[node.index] = not node.has_effect
            for t in node.outputs:
                constant[t] = not node.has_effect
    place = list(range(n))
    reader = [n] * n
    for node in reversed(graph.nodes):
        here = node.index
        if floats[here] and reader[here] < n:
            place[here] = here = reader[here]
        for t in node.inputs:
            source = made_by[t]
            if source >= 0 and floats[source] and here < reader[source]:
                reader[source] = here
    return np.argsort(np.array(place, np.int64), kind="stable").astype(np.int64)


def _crossing(graph: Graph, order: _Ints) -> _Floats:
    """For each cut the bytes alive across it: made before, read after.

    Weights and inputs do not count, and a cheap value counts no more than its operands: it can be repeated.
    """
    n, tensors = len(graph.nodes), graph.tensors
    position = np.argsort(order).tolist()  # of a node in the order
    size = [0.0] * len(tensors)
    made, read = [0] * len(tensors), [0] * len(tensors)
    for node in graph.nodes:
        here = position[node.index]
        for t in node.inputs:
            if read[t] < here:
                read[t] = here
        cheap = node.is_cheap
        for t in node.outputs:
            made[t], size[t] = here, tensors[t].nbytes
            if cheap:
                size[t] = min(size[t], sum([size[t] for t in set(node.inputs)]))
    change = np.zeros(n + 2)
    sizes, begins, ends = np.array(size, np.float64), np.array(made, np.int64), np.array(read, np.int64)
    alive = ends > begins
    np.add.at(change, begins[alive] + 1, sizes[alive])
    np.add.at(change, ends[alive] + 1, -sizes[alive])
    return np.cumsum(change)[: n + 1]


def _round_to_few(intensities: Sequence[float]) -> list[float]:
    """Round to `MAX_INTENSITIES` values where there are more: a column is kept for each."""
    if len(set(intensities)) <= MAX_INTENSITIES:
        return list(intensities)
    steps = np.geomspace(min(intensities), max(intensities), MAX_INTENSITIES)
    nearest = np.abs(np.log(np.array(intensities))[:, None] - np.log(steps)).argmin(axis=1)
    return [float(steps[k]) for k in nearest]


def _least(values: _Floats, low: _Ints, high: _Ints) -> _Floats:
    """Minimum of ``values[low[i]:high[i] + 1]`` for each i, infinity where that is empty: a sparse table."""
    result, some = np.full(len(low), np.inf), np.flatnonzero(high >= low)
    low, high = low[some], high[some]
    level = np.frexp((high - low + 1).astype(np.float64))[1] - 1  # floor of the length's logarithm
    table, least = values, np.empty(len(some))
    for k in range(int(level.max(initial=-1)) + 1):
        here = level == k
        least[here] = np.minimum(table[low[here]], table[high[here] + 1 - (1 << k)])
        if len(table) > 1 << k:
            table = np.minimum(table[: -(1 << k)], table[1 << k :])
    result[some] = least
    return result


def _by_ratios(work: _Work, ratios: Sequence[float]) -> list[int]:
    """Cuts near the shares' borders, where few bytes cross: within 5 % of the whole or half a neighbour's share."""
    whole = math.fsum(ratios) if all(math.isfinite(r) and r >= 0 for r in ratios) else 0.0
    if not whole:
        raise PlacementError(f"got ratios {list(ratios)}, expected finite numbers >= 0, not all of them 0")
    used = [i for i, r in enumerate(ratios) if r > 0]
    total = work.total[used[0]]
    if total[-1] <= 0:
        total = np.arange(work.n + 1, dtype=np.float64)
    cuts = [0] * (used[0] + 1)
    share = 0.0
    for here, following in itertools.pairwise(used):
        share += ratios[here] / whole
        target = share * total[-1]
        reach = min(SLACK, ratios[here] / whole / 2, ratios[following] / whole / 2) * total[-1]
        low = max(cuts[-1], int(np.searchsorted(total, target - reach, "left")))
        high = int(np.searchsorted(total, target + reach, "right")) - 1
        options = np.arange(low, high + 1)
        if low > high:  # one node is longer than that: the nearer of its sides
            options = np.array([max(cuts[-1], high), max(cuts[-1], min(high + 1, work.n))])
        else:
            options = options[work.crossing[options] <= work.crossing[options].min()]
        cuts += [int(options[np.argmin(np.abs(total[options] - target))])] * (following - here)
    return cuts + [work.n] * (len(ratios) - used[-1])


def _finish(graph: Graph, devices: Sequence[Device], work: _Work, cuts: Sequence[int]) -> Partition:
    pieces = list(itertools.pairwise(cuts))
    nbytes = [work.reads.nbytes_between(begin, end) for begin, end in pieces]
    for device, needed, limit in zip(devices, nbytes, work.memory, strict=True):
        if limit is not None and needed > limit:
            raise PlacementError(
                f"these ratios give {device.name!r} weights of {needed} bytes, but it may use {limit}: "
                "give it a smaller share, or raise its memory limit"
            )
    at_position = np.repeat(np.arange(len(pieces)), np.diff(np.array(cuts)))
    backend = np.empty(work.n, np.int64)
    backend[work.order] = at_position
    n = len(devices)
    weights: dict[int, tuple[int, ...]] = {}
    alone = [(b,) for b in range(n)]  # shared: most weights are read on one device
    for key in np.unique(work.reads.weight * n + at_position[work.reads.at]).tolist():
        t, b = divmod(key, n)
        weights[t] = (*weights[t], b) if t in weights else alone[b]
    seconds = tuple(work.seconds(i, begin, end) for i, (begin, end) in enumerate(pieces))
    return Partition(tuple(backend.tolist()), weights, seconds, tuple(nbytes))
