"""Devices for programs whose order a seed decides (`schedules`): simulated ones, with or without threads, and XLA's.

Devices are free to be slow, and to be seen to be done late: what the seed decides here is

- for simulated devices how long operations and copies take, so which of two devices is done first;
- whether a value that is ready is seen to be (`Backend.all_ready`) or the asker came a moment too early, in which case
  it is told by and by (`Backend.notify`); what somebody was told of, and all that it was made of, is ready for all;
- which thread launches: the caller's, one for all devices, or one for each.

On XLA's devices "ready" waits for the value and "not ready" says so, whatever is true, and launches and copies wait for
what they read, for whether they notice that it failed is theirs to say: so nothing depends on how fast the machine is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import jax

import aiopipe as ap
from aiopipe import _jax, staging
from aiopipe.backend import Backend, Executable, Lane, ThreadLane
from aiopipe.devices.base import Program
from aiopipe.devices.sim import Cluster, SimBackend
from aiopipe.devices.simvalue import PENDING
from aiopipe.devices.xla import XlaBackend, xla_devices
from aiopipe.graph import Graph
from happens_before import HappensBefore
from schedules import Schedule
from simgraphs import settled

Kind = Literal["inline", "lanes", "xla"]
KINDS: tuple[Kind, ...] = ("inline", "lanes", "xla")


class Eyes:
    """Who sees that a value is ready."""

    def __init__(self, rng: random.Random, known: HappensBefore) -> None:
        self._rng = rng
        self._known = known
        self._rate = rng.choice((0.0, 0.3, 0.7, 1.0))

    def sees(self, values: Sequence[Any]) -> bool:
        """Whether the asker came late enough for all of them."""
        return all(self._known.is_told(value) for value in values) or self._rng.random() < self._rate

    def told(self, values: Sequence[Any]) -> None:
        """Somebody has been told otherwise than by asking."""
        self._known.ready(values)


class SimDevice(SimBackend):
    """A simulated device; with `threads` it launches and tells from threads, as XLA's do."""

    def __init__(self, cluster: Cluster, index: int, eyes: Eyes, threads: bool, dispatch: Any) -> None:
        super().__init__(cluster, cluster.backends[index].unit, dispatch=dispatch)
        self._eyes = eyes
        self.has_threads = threads
        self._completion = ThreadLane(f"{self.name}-completion") if threads else None

    def all_ready(self, values: Sequence[Any]) -> bool:
        return super().all_ready(values) and self._eyes.sees(values)

    def notify(self, values: Sequence[Any], callback: Callable[[BaseException | None], None]) -> None:
        completion = self._completion
        if completion is None:
            super().notify(values, callback)
        else:
            super().notify(values, lambda error: self._tell(completion, callback, error))

    @staticmethod
    def _tell(completion: Lane, callback: Callable[[BaseException | None], None], error: BaseException | None) -> None:
        try:
            completion.post(lambda: callback(error))
        except ap.BackendClosedError:
            callback(error)

    def make_lane(self, *, own: bool) -> Lane:
        if self._completion is None:
            return super().make_lane(own=own)
        return ThreadLane(self.name if own else "sim-dispatch")

    def end_threads(self) -> None:
        if self._completion is not None:
            self._completion.close()


_compiled: dict[Any, Executable] = {}
"""XLA takes longer to compile than a program takes to run."""


class XlaDevice(XlaBackend):
    """A device of XLA's that is ready when the seed says so."""

    def __init__(self, index: int, eyes: Eyes, dispatch: Any) -> None:
        super().__init__(xla_devices("cpu")[index], dispatch=dispatch)
        self._eyes = eyes

    def load(self, program: Program) -> Executable:
        key = (program.key, self.name)
        if key in _compiled:
            self.check_open()
        else:
            _compiled[key] = super().load(program)
        executable = _compiled[key]

        def call(*operands: Any) -> Any:
            _finish(operands)  # else it would depend on time whether one that has failed is noticed here
            try:
                return executable.call(*operands)
            except Exception:
                self._eyes.told(operands)  # that one of them has failed
                raise

        return replace(executable, call=call)

    def all_ready(self, values: Sequence[Any]) -> bool:
        if not self._eyes.sees(values):
            return False
        _finish(values)
        return True

    def transfer(self, values: Sequence[Any]) -> Sequence[Any]:
        return [self._moved(value) for value in values]

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return super().transfer((value,))[0]
        _finish((value,))
        try:
            if self._eyes.sees((value,)):
                return super().transfer((value,))[0]
            with _jax.wide_context((value,)):
                return _jax.put([value], self.jax_device)[0]
        except Exception:
            self._eyes.told((value,))  # that it has failed
            raise


def _finish(values: Sequence[Any]) -> None:
    """Wait until values are there, however they end."""
    for value in values:
        if isinstance(value, jax.Array):
            with suppress(Exception):
                value.block_until_ready()


class World:
    """What a program runs on.

    Attributes:
        rng: for the program's own choices.
        kind: of devices.
        cluster: of the simulated ones.
        inline_capture_nbytes: for `aiopipe.staging`: all inputs are captured in a thread, or none of those here.
    """

    def __init__(self, schedule: Schedule, kind: Kind) -> None:
        self.schedule = schedule
        self.kind = kind
        self.rng = random.Random(schedule.rng.random())
        self.arrival, self.arrivals = schedule.arrival, schedule.arrivals
        self._eyes = Eyes(random.Random(schedule.rng.random()), schedule.known)
        self._opened: list[Backend] = []
        self.inline_capture_nbytes = self.rng.choice((0, staging.INLINE_CAPTURE_NBYTES))
        self.cluster = self._cluster()

    def _cluster(self) -> Cluster:
        costs = [self.rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(4)]
        latency_s = self.rng.choice((0.0, 0.25, 2.0))
        cluster = Cluster(
            4,
            compute=True,
            node_cost_s=lambda node, device: costs[(node.index + device.index) % 4],
            latency_s=latency_s,
            host_bytes_per_s=self.rng.choice((8.0, 64.0, 1e9)),
        )
        cluster.clock.call_at(0.0, lambda: None)  # so that it knows its loop before a thread needs to
        return cluster

    def devices(self, n: int) -> list[Backend]:
        """The first devices, newly opened."""
        dispatch = self.rng.choice(("auto", "shared", "own"))
        opened: list[Backend] = []
        for i in range(n):
            if self.kind == "xla":
                opened.append(XlaDevice(i, self._eyes, dispatch))
            else:
                how = dispatch if self.kind == "lanes" else "auto"
                opened.append(SimDevice(self.cluster, i, self._eyes, self.kind == "lanes", how))
        self.schedule.known.watch(*opened)
        self._opened += opened
        return opened

    def of(self, graph: Graph) -> Graph:
        """A graph built by hand, fit for the devices."""
        return replace(graph, config=(("enable_x64", True),)) if self.kind == "xla" else graph

    async def close(self, *scheds: ap.Scheduler) -> None:
        """Nothing may be left."""
        for sched in scheds:
            await sched.synchronize()
            settled(sched)
            await sched.aclose()
            settled(sched)
        for backend in self._opened:
            await backend.aclose()


__all__ = ["KINDS", "PENDING", "Kind", "World"]
