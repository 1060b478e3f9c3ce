"""Weights in buffers: which buffer a backend's operations read, and what happens when it is set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _threads
from .backend import Backend
from .buffer import Buffer, View, held_value
from .graph import Tensor

__all__ = ["LiveWeights", "held_by", "source_buffer", "source_value"]


def held_by(tensor: Tensor, backends: Sequence[Backend]) -> tuple[int, ...]:
    """Indices of the backends that hold a weight already: those of its buffers, or of a committed array."""
    if tensor.buffers:
        return tuple(i for i, backend in enumerate(backends) if any(_in_place(b, backend) for b in tensor.buffers))
    return tuple(i for i, backend in enumerate(backends) if backend.holds(tensor.source))


def source_buffer(tensor: Tensor, backend: Backend) -> Buffer | None:
    """The buffer that a backend gets a weight from: its own, or else the first; None without buffers."""
    own = [buffer for buffer in tensor.buffers if buffer.backend is backend] or tensor.buffers
    found: Buffer | None = own[0] if own else None
    return found


def source_value(tensor: Tensor, backend: Backend) -> Any:
    """The weight's value to give to `backend`: the one that it has itself, or else any.

    Raises:
        TensorError: it has no value, has not been set, or has been freed.
    """
    if tensor.buffers or isinstance(tensor.source, Tensor | View):
        return held_value(tensor, backend)
    return tensor.given()


def _in_place(buffer: Buffer, backend: Backend) -> bool:
    """Whether a backend's operations read a buffer in place: it is its own, and of no other memory."""
    return buffer.backend is backend and backend.supports_buffer_type(buffer.buffer_type)


class LiveWeights:
    """Renews what was made of a plan's weights when one of them is set.

    An evaluation that has launched a split keeps the weights that it launched it with.

    Args:
        weights: for each backend the weights that it reads.
        backends: in the same order.
    """

    def __init__(self, weights: Sequence[Sequence[Tensor]], backends: Sequence[Backend]) -> None:
        self._lock = _threads.Lock()  # weights are set on lanes, and bound wherever their plan is loaded
        self._places: dict[int, list[tuple[Tensor, Backend, Any, Any]]] = {}
        self._early: list[Buffer] | None = []  # set before anything was bound
        read = [source_buffer(t, backend) for held, backend in zip(weights, backends, strict=True) for t in held]
        for buffer in {id(buffer): buffer for buffer in read if buffer is not None}.values():
            buffer.watch(self._renew)

    def bind(self, places: Sequence[tuple[Tensor, Backend, Any, Any]]) -> None:
        """Have ``container[key]`` follow the value of a tensor on a backend, for each of ``(tensor, backend,
        container, key)``. What was set since this object was made counts."""
        with self._lock:
            for tensor, backend, container, key in places:
                buffer = source_buffer(tensor, backend)
                if buffer is not None:
                    self._places.setdefault(id(buffer), []).append((tensor, backend, container, key))
            early, self._early = self._early, None
        for buffer in early or ():
            self._put(buffer)

    def _renew(self, buffer: Buffer) -> None:
        """On a lane of the buffer's backend."""
        with self._lock:
            if self._early is not None:
                self._early.append(buffer)
                return
        self._put(buffer)

    def _put(self, buffer: Buffer) -> None:
        """Bring a buffer's value to all its places, unless it is replaced meanwhile: who does that comes here, too."""
        value = buffer.value
        moved: dict[str, Any] = {}
        found = []
        for tensor, backend, container, key in self._places.get(id(buffer), ()):
            there = value
            if not _in_place(buffer, backend):
                if backend.name not in moved:
                    # Asynchronous where the backend knows the value's kind; else by way of the host.
                    known = backend.accepts(value)
                    moved[backend.name] = backend.transfer([value])[0] if known else backend.upload(value, tensor)
                there = moved[backend.name]
            found.append((container, key, there))
        with self._lock:  # not before: bringing it over may wait, and others set other weights
            if buffer.value is value:
                for container, key, there in found:
                    container[key] = there
