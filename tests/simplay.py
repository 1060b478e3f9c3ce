"""Plays on simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import aiopipe as ap
import plays
from aiopipe.devices.sim import Cluster
from aiopipe.graph import Graph
from plays import flat
from simgraphs import array
from simprograms import bad, expected

__all__ = ["Play", "flat"]


class Simulated:
    """The `World` of a cluster."""

    launches_bit_by_bit = False

    def __init__(self, cluster: Cluster) -> None:
        self.sleep = cluster.clock.sleep
        self.array = array
        self.expected = expected

    def poison(self, first: np.ndarray[Any, Any]) -> None:
        bad.add(int(first[0]))

    def is_poisoned(self, first: np.ndarray[Any, Any]) -> bool:
        return int(first[0]) in bad

    def is_fault(self, error: BaseException | None) -> bool:
        return isinstance(error, ArithmeticError)

    def hold(self, *, hold: bool) -> None:
        """Time is virtual: what is slow takes no longer."""


class Play(plays.Play):
    """A play on a cluster."""

    def __init__(self, cluster: Cluster, sched: ap.Scheduler, graphs: Sequence[Graph], n_states: int) -> None:
        super().__init__(Simulated(cluster), sched, graphs, n_states)
