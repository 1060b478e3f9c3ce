"""Staging: the host memory that an evaluation's inputs are captured in.

Each slot has one set of staging buffers. It belongs to the plan that captured in it last: when a
slot goes to an evaluation of another plan, the old set is let go, so that the number of plans
that are loaded does not matter.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ._jax_settings import undisturbed
from .backend import Backend
from .errors import AllocationError, TensorError, said_by
from .sched.plan import Plan

__all__ = ["Slots", "Staging"]

INLINE_CAPTURE_NBYTES = 1 << 19
"""Inputs up to this size are copied on the event loop: it takes less than handing them over."""

_NUMBERS = (bool, int, float, complex, np.generic)


class Slots:
    """Whose staging buffers each slot has: one object for all plans of a scheduler.

    Slots are taken on the loop and, for large inputs, on the thread that captures, while the loop may trim. So each
    step on the dictionary is one that the interpreter does not part: none iterates over it in Python.
    """

    def __init__(self) -> None:
        self._owner: dict[int, weakref.ref[Staging]] = {}

    def take(self, copy_id: int, staging: Staging) -> None:
        """Have the slot's last owner let its buffers go, if there is one."""
        self._let_go(copy_id)
        self._owner[copy_id] = weakref.ref(staging)

    def trim(self, n_copies: int) -> None:
        """Let go of the buffers of slots that exist no longer."""
        for copy_id in list(self._owner):
            if copy_id >= n_copies:
                self._let_go(copy_id)

    def _let_go(self, copy_id: int) -> None:
        known = self._owner.pop(copy_id, None)
        owner = known() if known is not None else None
        if owner is not None:
            owner.buffers.pop(copy_id, None)


class Staging:
    """Captures the inputs of one plan.

    Attributes:
        buffers: copy_id -> for each captured input its buffer and what stands for it in the environment (both None
            where none is needed).
        returned: environment slots of inputs that are outputs, too.
    """

    def __init__(self, plan: Plan, backends: Sequence[Backend], slots: Slots) -> None:
        self.plan = plan
        self.buffers: dict[int, list[tuple[Any, Any]]] = {}
        self._slots = slots
        self._host_backends, self._alone = _readers(plan, backends)
        self.returned = tuple(dict.fromkeys(slot for kind, slot in plan.results if kind == "input"))
        used = [(position, plan.graph.inputs[position]) for position in plan.used_inputs]
        self._inputs = [(slot, i, self._host_backends[slot], tensor) for slot, (i, tensor) in enumerate(used)]

    def _new_buffer(self, slot: int) -> tuple[Any, Any]:
        """A buffer for an input, and what stands for it: what its only reader shows, for others might keep that."""
        if slot in self.returned:
            return None, None
        backend = self._host_backends[slot]
        tensor = self.plan.graph.inputs[self.plan.used_inputs[slot]]
        with backend.asking_for(tensor):
            buffer = backend.host_buffer(tensor)
            return buffer, backend.show(buffer) if self._alone[slot] else buffer

    def captures_inline(self, values: Sequence[Any]) -> bool:
        """Whether `capture` takes so little time that the loop can do it: small, and nothing to wait for."""
        copied = 0
        for slot, position, backend, tensor in self._inputs:
            value = values[position]
            if type(value) is not np.ndarray and backend.accepts(value):
                continue  # taken as it is, whatever its size
            if slot in self.returned and backend.device.props.remote:
                return False  # uploaded, over the network
            if type(value) is not np.ndarray and not isinstance(value, _NUMBERS):
                return False  # some other library's or another client's array: reading it may wait
            copied += tensor.nbytes
        return copied <= INLINE_CAPTURE_NBYTES

    def capture(self, copy_id: int, values: Sequence[Any], slots: list[Any]) -> None:
        """Copy the inputs into the slot's own buffers, so that the caller may change its arrays.

        Immutable arrays are taken as they are. Runs on the loop or, for large inputs, in a thread.

        Raises:
            TensorError: a value cannot be read.
            AllocationError: there is no room for it.
        """
        staging = self.buffers.get(copy_id)
        if staging is None:  # the slot is another's, who has to let go of it, or nobody's
            self._slots.take(copy_id, self)
            staging = self.buffers[copy_id] = [self._new_buffer(slot) for slot, *_ in self._inputs]
        for slot, position, backend, tensor in self._inputs:
            value = values[position]
            plain = type(value) is np.ndarray
            if not plain and backend.accepts(value):
                slots[slot] = value
                continue
            buffer, shown = staging[slot]
            try:
                if slot in self.returned:  # the caller will hold it: it cannot be the slot's
                    with backend.asking_for(tensor):
                        slots[slot] = backend.upload(value, tensor)
                    continue
                if plain and type(buffer) is np.ndarray and value.dtype == buffer.dtype:
                    buffer[...] = value  # without the frames of Python that `copyto` has
                else:
                    _copy(value, buffer)
                slots[slot] = shown
            except AllocationError:
                raise
            except Exception as error:  # whatever the library that made the value raises
                # Without the frames, which would keep the caller's arrays alive.
                cause = error.with_traceback(None)
                raise TensorError(f"input {tensor.describe()} cannot be read: {said_by(error)}") from cause


def _copy(value: Any, buffer: Any) -> None:
    if isinstance(value, np.ndarray):
        np.copyto(buffer, value, casting="same_kind")
        return
    with undisturbed():  # of another client, say, so that it has to be transferred
        np.copyto(buffer, value, casting="same_kind")


def _readers(plan: Plan, backends: Sequence[Backend]) -> tuple[list[Backend], list[bool]]:
    """For each used input the backend that reads it first (the host where none does), and whether no other does."""
    readers: dict[int, list[int]] = {}
    for split in plan.splits:
        for t in split.inputs:
            readers.setdefault(t, []).append(split.backend)
    of_inputs = [readers.get(plan.graph.inputs[position].id, [-1]) for position in plan.used_inputs]
    return [backends[of[0]] for of in of_inputs], [len(set(of)) == 1 for of in of_inputs]
