"""`Placing`: where the weights of a plan are, and those that have to be uploaded first."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .backend import Backend
from .graph import Tensor
from .live_weights import LiveWeights, held_by, source_value
from .sched.plan import Plan

__all__ = ["Placing", "Source", "Upload"]

Source = tuple[int, str, str]
"""What an upload was made of: the identity of the value, the backend, and the type that it has there."""


class Upload:
    """A weight that was put on a backend; lives as long as a plan that uses it."""

    __slots__ = ("__weakref__", "source", "value")

    def __init__(self, source: Any, value: Any) -> None:
        self.source = source  # kept so that nothing else gets its id meanwhile
        self.value = value


@dataclass(slots=True, eq=False)
class _Missing:
    tensor: Tensor
    backend: Backend
    value: Any
    homes: list[tuple[dict[int, Any], int]] = field(default_factory=list)


class Placing:
    """Looks up the weights of one plan; `upload` puts those that are `missing` where they are needed.

    Args:
        plan: whose weights.
        backends: in the plan's order.
        known: what other plans have uploaded; what this one does is added.

    Raises:
        TensorError: a weight has not been set, or has been freed.

    Attributes:
        weights: for each backend the values of its weights, by tensor id.
        missing: what is to be uploaded: an array that is several weights of a backend is there once.
        uploads: what the plan uses of what was uploaded, now or for others.
        copied_nbytes: of what was uploaded now.
        live: has watched the weights since before they were looked up.
        ended: nobody waits for it any more: nothing more is uploaded.
    """

    def __init__(
        self, plan: Plan, backends: Sequence[Backend], known: weakref.WeakValueDictionary[Source, Upload]
    ) -> None:
        self.uploads: list[Upload] = []
        self.copied_nbytes = 0
        self.ended = False
        self._known = known
        tensors = plan.graph.tensors
        self.live = LiveWeights([[tensors[tid] for tid in sorted(ids)] for ids in plan.weights], backends)
        self.missing: dict[Source, _Missing] = {}
        self.weights: list[dict[int, Any]] = []
        for backend, ids in zip(backends, plan.weights, strict=True):
            held: dict[int, Any] = {}
            for tid in sorted(ids):
                self._look_up(tensors[tid], backend, held)
            self.weights.append(held)

    def _look_up(self, tensor: Tensor, backend: Backend, held: dict[int, Any]) -> None:
        value = source_value(tensor, backend)
        if held_by(tensor, [backend]):
            held[tensor.id] = value
            return
        source = (id(value), backend.name, tensor.dtype)
        known = None if _may_change(value) else self._known.get(source)
        if known is not None:
            held[tensor.id] = known.value
            self.uploads.append(known)
        else:
            self.missing.setdefault(source, _Missing(tensor, backend, value)).homes.append((held, tensor.id))

    def upload(self) -> None:
        """Upload what is missing. In a thread: it may take long.

        Raises:
            AllocationError: a backend found no room; what had been uploaded is let go.
        """
        try:
            for source, missing in self.missing.items():
                if self.ended:
                    return
                self._upload(source, missing)
        except BaseException:  # whose traceback leads here
            self.uploads.clear()
            for held in self.weights:
                held.clear()
            raise
        finally:
            self.missing.clear()

    def _upload(self, source: Source, missing: _Missing) -> None:
        with missing.backend.asking_for(missing.tensor):
            upload = Upload(missing.value, missing.backend.upload(missing.value, missing.tensor))
        if not _may_change(missing.value):
            self._known[source] = upload
        self.uploads.append(upload)
        self.copied_nbytes += missing.tensor.nbytes
        for held, tid in missing.homes:
            held[tid] = upload.value


def _may_change(value: Any) -> bool:
    """Whether it may be another weight the next time: an array of NumPy whose memory somebody can write to.

    Its own flag says so of itself alone. A view that is read only has the memory of another array, or of an object
    that NumPy knows nothing of; where that does not say that it is read only, it counts as one that can be written.
    """
    if not isinstance(value, np.ndarray):
        return False
    while True:
        if isinstance(value, np.ndarray):
            if value.flags.writeable:
                return True
            if value.base is None:
                return False
            value = value.base
        elif isinstance(value, memoryview) and value.obj is not None:  # perhaps a read-only one of a bytearray
            value = value.obj
        else:
            return not _is_read_only(value)


def _is_read_only(owner: Any) -> bool:
    try:
        with memoryview(owner) as seen:
            return seen.readonly
    except Exception:  # it shows its memory to nobody, or not any more
        return False
