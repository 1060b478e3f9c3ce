"""Simulated devices: real schedules on a virtual clock.

They stand where real devices do, under the same scheduler, and answer with arithmetic instead of
work: when something is launched, the virtual time at which it will end is already known. A cluster
of a thousand of them runs a million launches in seconds, and overlap is tested without sleeping.

A cluster computes real values only if asked to (``compute=True``): then a launch evaluates its nodes
at its virtual end, and a copy reads its source, the staging buffer itself, when it virtually arrives.
A buffer that is reused too early gives a wrong result here every time, not once in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from ..backend import Dispatch, InlineLane
from ..errors import PlacementError
from ..graph import Node
from .base import DeviceProps, DeviceType, Program
from .clock import VirtualClock
from .simbackend import Record, SimBackend
from .simops import HostOp, fail, seconds_of, sleep
from .simvalue import Link, SimDevice, SimValue, Unit

__all__ = [
    "Cluster",
    "HostOp",
    "Record",
    "SimBackend",
    "SimDevice",
    "SimValue",
    "VirtualClock",
    "default_cluster",
    "fail",
    "open_sim",
    "sleep",
]

_T = TypeVar("_T")


class Cluster:
    """Simulated devices that share one virtual clock and one lane.

    Args:
        n: how many devices.
        node_cost_s: virtual seconds for one node, the same for all or by node and device. A node whose
            `fn` has a ``cost_s`` costs that. Default: the roofline of the node's flops and bytes.
        split_cost_s: seconds for one launch of a program, instead of the sum over its nodes.
        latency_s: what a copy takes after its bytes have left the link.
        link_bytes_per_s: bandwidth from one device to another.
        host_bytes_per_s: bandwidth from the host to a device.
        memory_nbytes: what a device may use, for all or each; None: no limit. Planning checks it.
        flops_per_s: speed of the devices, for all or each.
        bytes_per_s: memory bandwidth of the devices, for all or each.
        temp_nbytes: scratch of a launch, for all programs or by program.
        compute: whether values are computed. Otherwise results read as zeros.
        record: whether `log` is kept.
        unsupported_ops: names of ops that no device runs, or by index of the device.

    Attributes:
        clock: the virtual clock.
        backends: one for each device.
        log: what was launched and copied, in order of posting, when `record`.

    Raises:
        ValueError: a number is negative, not a number, or there are too few of them.
    """

    def __init__(
        self,
        n: int,
        *,
        node_cost_s: float | Callable[[Node, SimDevice], float] | None = None,
        split_cost_s: float | Callable[[Program, SimDevice], float] | None = None,
        latency_s: float = 0.0,
        link_bytes_per_s: float = math.inf,
        host_bytes_per_s: float = math.inf,
        memory_nbytes: int | Sequence[int | None] | None = None,
        flops_per_s: float | Sequence[float] = 5e10,
        bytes_per_s: float | Sequence[float] = 1e10,
        temp_nbytes: int | Callable[[Program], int] = 0,
        compute: bool = False,
        record: bool = False,
        unsupported_ops: Collection[str] | Mapping[int, Collection[str]] = frozenset(),
    ) -> None:
        self.clock = VirtualClock()
        self.backends: tuple[SimBackend, ...] = ()
        self.log: list[Record] = []
        self.compute = compute
        self.record = record
        self.temp_nbytes = temp_nbytes
        self._node_cost_s = node_cost_s
        self._split_cost_s = split_cost_s
        self._latency_s = seconds_of(latency_s, "latency_s")
        self._link_bytes_per_s = _rate(link_bytes_per_s, "link_bytes_per_s")
        self._host_bytes_per_s = _rate(host_bytes_per_s, "host_bytes_per_s")
        self._memory_nbytes = memory_nbytes
        self._flops_per_s = flops_per_s
        self._bytes_per_s = bytes_per_s
        self._unsupported_ops = unsupported_ops
        self._client = object()
        self.lane = InlineLane("sim")
        if n < 0:
            raise ValueError(f"Cluster({n}): expected a number of devices")
        self._grow(n)

    def open(self, index: int, *, dispatch: Dispatch = "auto") -> SimBackend:
        """Open one more backend on a device; it shares the device's queue with the others."""
        return SimBackend(self, self._unit(index), dispatch=dispatch)

    def fail_next_allocation(self, index: int) -> None:
        """Make the next `load` or `upload` on that device raise `AllocationError`."""
        self._unit(index).fail_allocation = True

    def busy_s(self, index: int) -> float:
        """Virtual seconds that the device's launches take together, those to come included."""
        return self._unit(index).busy_s

    def link(
        self, src: int | None, dst: int, *, latency_s: float | None = None, bytes_per_s: float | None = None
    ) -> None:
        """Change one link, for the copies posted from now on. `src` None is the host."""
        link = self.link_between(None if src is None else self._unit(src), self._unit(dst))
        if latency_s is not None:
            link.latency_s = seconds_of(latency_s, "latency_s")
        if bytes_per_s is not None:
            link.bytes_per_s = _rate(bytes_per_s, "bytes_per_s")

    def program_cost_s(self, program: Program, device: SimDevice) -> float:
        """Virtual seconds that one launch of the program takes on a device."""
        cost = self._split_cost_s
        if cost is None:
            return math.fsum(self._node_cost(node, device) for node in program.nodes)
        return seconds_of(cost(program, device) if callable(cost) else cost, "split_cost_s")

    def _node_cost(self, node: Node, device: SimDevice) -> float:
        cost = getattr(node.fn, "cost_s", None)
        if cost is None:
            cost = self._node_cost_s
            if callable(cost):
                cost = cost(node, device)
            elif cost is None:
                cost = max(node.flops / device.props.flops_per_s, node.nbytes / device.props.bytes_per_s)
        return seconds_of(cost, f"cost of {node.name}")

    def _grow(self, n: int) -> None:
        ops = self._unsupported_ops
        backends = list(self.backends)
        for i in range(len(backends), n):
            props = DeviceProps(
                DeviceType.SIM,
                self._client,
                memory_nbytes=_each(self._memory_nbytes, i, "memory_nbytes"),
                flops_per_s=_rate(_each(self._flops_per_s, i, "flops_per_s"), "flops_per_s"),
                bytes_per_s=_rate(_each(self._bytes_per_s, i, "bytes_per_s"), "bytes_per_s"),
            )
            device = SimDevice(i, props, ops.get(i, ()) if isinstance(ops, Mapping) else ops)
            backends.append(SimBackend(self, Unit(device, self.clock)))
        self.backends = tuple(backends)

    def _unit(self, index: int) -> Unit:
        if not 0 <= index < len(self.backends):
            raise PlacementError(f"no simulated device {index}: the cluster has {len(self.backends)}, counted from 0")
        return self.backends[index].unit

    def link_between(self, src: Unit | None, dst: Unit) -> Link:
        """The link from a device, or from the host, to a device."""
        link = dst.inbound.get(src)
        if link is None:
            # Made when first used: a thousand devices have a million of them.
            rate = self._host_bytes_per_s if src is None else self._link_bytes_per_s
            link = dst.inbound[src] = Link(self._latency_s, rate)
        return link


def _rate(value: float, what: str) -> float:
    if not value > 0.0:
        raise ValueError(f"{what} is {value!r}: expected more than 0 per second (math.inf for no limit)")
    return float(value)


def _each(value: _T | Sequence[_T], i: int, what: str) -> _T:
    if not isinstance(value, Sequence):
        return value
    if i >= len(value):
        raise ValueError(f"{what} has {len(value)} entries: expected one for each device, also for device {i}")
    return value[i]


_default: Cluster | None = None


def default_cluster() -> Cluster:
    """The cluster behind ``open_backend("sim:0")``: it computes, its copies take no time, and it grows as needed."""
    global _default
    if _default is None:
        _default = Cluster(0, compute=True)
    return _default


def open_sim(params: str, *, dispatch: Dispatch = "auto") -> SimBackend:
    """Open ``"sim:<params>"``: a device of the default cluster, made if it is not there yet.

    Raises:
        PlacementError: `params` is neither empty nor a number.
    """
    if params and not (params.isascii() and params.isdigit()):
        raise PlacementError(f"unknown device 'sim:{params}': expected a number, as in 'sim:0'")
    index = int(params or 0)
    cluster = default_cluster()
    cluster._grow(index + 1)
    return cluster.open(index, dispatch=dispatch)
