"""The devices that a command names: real ones, opened for a moment, or simulated ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..backend import Backend
from ..devices.base import Device
from ..devices.sim import Cluster
from ..registry import with_host
from ..sched.alloc import memory_limits
from . import quantities
from .estimate import Links
from .outcome import UsageError

__all__ = ["BANDWIDTH", "FLOPS", "Hardware", "Simulated", "hardware", "links_of", "memory_by_name"]

MAX_SIMULATED = 4096

FLOPS, BANDWIDTH = "0.05T", "10GB/s"
"""What simulated devices can do by default: as much as a CPU is assumed to."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """What simulated devices can do, as it was typed."""

    flops: str = FLOPS
    bandwidth: str = BANDWIDTH


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a plan is made for.

    Attributes:
        devices: in order of priority; a host CPU that nobody named is the last.
        named: how many of them the user named.
        limits: for each device the bytes that it may use, or None.
        links: the ways between them.
        backends: what was opened, to be closed.
        simulated: whether they exist.
    """

    devices: tuple[Device, ...]
    named: int
    limits: tuple[int | None, ...]
    links: Links
    backends: tuple[Backend, ...] = ()
    opened: tuple[Backend, ...] = field(default=(), repr=False)

    @property
    def simulated(self) -> bool:
        """Whether they exist in virtual time alone."""
        return not self.backends


def hardware(specs: Sequence[str], *, memory: str | None, links: Links, simulated: Simulated) -> Hardware:
    """The devices that specs name.

    Args:
        specs: ``("cpu:0", "cpu:1")``, or ``("sim:8",)`` for eight simulated devices.
        memory: what each may use, as it was typed.
        links: the ways between them.
        simulated: what the simulated ones can do.

    Raises:
        UsageError: they cannot be together, or are too many.
        PlacementError: there is no such device.
    """
    if any(spec.partition(":")[0] == "sim" for spec in specs):
        return _cluster(specs, memory, links, simulated)
    if simulated != Simulated():
        raise UsageError("--flops and --bandwidth describe simulated devices: give --devices sim:N with them")
    backends, opened = with_host(specs)
    devices = [backend.device for backend in backends]
    limits = memory_limits(devices, memory_by_name(memory, [device.name for device in devices[: len(specs)]]))
    return Hardware(tuple(devices), len(specs), tuple(limits), links, backends, tuple(opened))


def _cluster(specs: Sequence[str], memory: str | None, links: Links, simulated: Simulated) -> Hardware:
    number = specs[0].partition(":")[2]
    if len(specs) > 1 or not number.isdecimal() or not 1 <= int(number) <= MAX_SIMULATED:
        raise UsageError(
            f"--devices: got {','.join(specs)!r}, expected sim:N for N simulated devices, at most {MAX_SIMULATED}, "
            "and no others beside them"
        )
    n = int(number)
    flops = [quantities.flops(s, "--flops") for s in quantities.each(simulated.flops, n, "--flops")]
    rates = [quantities.per_second(s, "--bandwidth") for s in quantities.each(simulated.bandwidth, n, "--bandwidth")]
    limits: list[int | None] = [None] * n
    if memory is not None:
        limits = [quantities.nbytes(s, "--memory") for s in quantities.each(memory, n, "--memory")]
    cluster = Cluster(n, memory_nbytes=limits, flops_per_s=flops, bytes_per_s=rates)
    devices = [backend.device for backend in cluster.backends]
    return Hardware(tuple(devices), n, tuple(limits), links)


def memory_by_name(memory: str | None, names: Sequence[str]) -> dict[str, int] | None:
    """What each device may use, as it was typed: for all, or for each."""
    if memory is None:
        return None
    sizes = quantities.each(memory, len(names), "--memory")
    return {name: quantities.nbytes(size, "--memory") for name, size in zip(names, sizes, strict=True)}


def links_of(link: str | None, host_link: str | None, latency: str | None) -> Links:
    """The ways between devices, as they were typed; without limit where nothing was."""
    return Links(
        math.inf if link is None else quantities.per_second(link, "--link"),
        math.inf if host_link is None else quantities.per_second(host_link, "--host-link"),
        0.0 if latency is None else quantities.seconds(latency, "--latency"),
    )
