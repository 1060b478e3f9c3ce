"""How a plan would run: every launch and copy of some evaluations, by the rules of simulated devices. Pure.

The same arithmetic as `devices.simbackend`, without a loop and without values, so that it answers for plans of real
devices, too: a device and a link do one thing after the other, in the order of launching; an evaluation is admitted
when the one `n_copies` before it has ended, and launched at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..sched.partition import estimate_seconds
from ..sched.plan import Plan
from ..sched.split import HOST

__all__ = ["Estimate", "Links", "estimate", "split_seconds"]


@dataclass(frozen=True, slots=True)
class Links:
    """The ways between devices.

    Attributes:
        bytes_per_s: of each link between two devices.
        host_bytes_per_s: of each link from the host to a device.
        latency_s: what a copy takes beyond its bytes.
    """

    bytes_per_s: float = math.inf
    host_bytes_per_s: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What streaming some evaluations through a plan comes to.

    Attributes:
        evaluations: how many.
        n_copies: how many of them in flight at most.
        alone_s: what one takes by itself.
        total_s: what all of them take.
        interval_s: from one result to the next, once the pipeline is full.
        bubble: the share of the used devices' time in which they have nothing to do, from the first launch to the
            last result.
        steady_bubble: the same while the pipeline is full, so without filling and draining.
        seconds: for each device what one evaluation computes there.
    """

    evaluations: int
    n_copies: int
    alone_s: float
    total_s: float
    interval_s: float
    bubble: float
    steady_bubble: float
    seconds: tuple[float, ...]

    @property
    def per_s(self) -> float:
        """Evaluations for each second, once the pipeline is full."""
        return 1 / self.interval_s if self.interval_s > 0 else math.inf

    @property
    def gain(self) -> float:
        """How much faster than one device's work after the other's."""
        return sum(self.seconds) / self.interval_s if self.interval_s > 0 else 1.0


def split_seconds(plan: Plan) -> list[float]:
    """For each split the roofline estimate of its nodes on its device."""
    nodes = plan.graph.nodes
    props = [device.props for device in plan.devices]
    return [math.fsum(estimate_seconds(nodes[i], props[split.backend]) for i in split.nodes) for split in plan.splits]


def estimate(plan: Plan, links: Links, n_copies: int, evaluations: int) -> Estimate:
    """Run so many evaluations of a plan in one's head.

    Args:
        plan: whose.
        links: what copies take.
        n_copies: how many evaluations are in flight at most.
        evaluations: how many there are, at least two.
    """
    costs = split_seconds(plan)
    seconds = [0.0] * len(plan.devices)
    for split, cost in zip(plan.splits, costs, strict=True):
        seconds[split.backend] += cost
    ends = _ends(plan, costs, links, n_copies, evaluations)
    alone_s = _ends(plan, costs, links, 1, 1)[0]
    half = evaluations // 2
    interval_s = (ends[-1] - ends[half - 1]) / (evaluations - half)
    used = {split.backend for split in plan.splits}
    work = math.fsum(costs)
    return Estimate(
        evaluations=evaluations,
        n_copies=n_copies,
        alone_s=alone_s,
        total_s=ends[-1],
        interval_s=interval_s,
        bubble=_idle(work * evaluations, len(used) * ends[-1]),
        steady_bubble=_idle(work, len(used) * interval_s),
        seconds=tuple(seconds),
    )


def _idle(busy_s: float, whole_s: float) -> float:
    return max(0.0, 1 - busy_s / whole_s) if whole_s > 0 else 0.0


def _ends(plan: Plan, costs: Sequence[float], links: Links, n_copies: int, evaluations: int) -> list[float]:
    """When each evaluation ends, in seconds from the start."""
    stride = len(plan.devices) + 1
    free = [0.0] * len(plan.devices)
    link_free: dict[tuple[int, int], float] = {}
    ends: list[float] = []
    for k in range(evaluations):
        now = ends[k - n_copies] if k >= n_copies else 0.0
        ready: dict[int, float] = {}  # values on their backends
        end = now
        for split, cost in zip(plan.splits, costs, strict=True):
            here = split.backend
            for t, src, nbytes in split.brings:
                begin = max(now, ready.get(t * stride + src, now), link_free.get((src, here), 0.0))
                rate = links.host_bytes_per_s if src == HOST else links.bytes_per_s
                link_free[src, here] = begin + nbytes / rate
                ready[t * stride + here] = link_free[src, here] + links.latency_s
            start = max([now, free[here], *(ready.get(t * stride + here, now) for t in split.inputs)])
            free[here] = done = start + cost
            end = max(end, done)
            for t in split.outputs:
                ready[t * stride + here] = done
        ends.append(max(end, ends[-1] if ends else 0.0))
    return ends
