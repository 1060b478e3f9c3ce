"""Inputs set and outputs read tensor by tensor, as in ggml, instead of with the call and its result."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ._arguments import Leaf, convert_numbers
from ._jax_types import canonical_dtype, dtype_of
from ._threads import in_thread
from .backend import Backend
from .errors import TensorError
from .evaluation import Evaluation
from .graph import Graph, Kind, Tensor

__all__ = ["ByHand"]

INLINE_NBYTES = 1 << 19
"""Values up to this size are copied on the event loop: it takes less than handing them over."""


class ByHand:
    """The values that were set for graphs' inputs, and the newest results of evaluations that used them.

    Both live as long as their graph, or until they are replaced or cleared.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._values: weakref.WeakKeyDictionary[Tensor, tuple[int, Any]] = weakref.WeakKeyDictionary()
        self._n_calls = 0
        self._cleared = 0
        self._newest: weakref.WeakKeyDictionary[Tensor, tuple[Evaluation, Mapping[int, Any]]]
        self._newest = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget all, also what is still being copied."""
        self._cleared = self._n_calls
        self._values.clear()
        self._newest.clear()

    async def set(self, tensor: Tensor, data: Any) -> None:
        """Set a graph's input; NumPy data is copied. Of several calls the last one counts, whichever ends first.

        Raises:
            TensorError: it is no input, or the data is of another shape or type.
        """
        if tensor.kind is not Kind.INPUT:
            raise TensorError(
                f"tensor {tensor.describe()} is a {tensor.kind.value}, not an input of a graph: set one of graph.inputs"
            )
        self._n_calls += 1
        call = self._n_calls
        value = await self._captured(tensor, data)
        if call > self._cleared and (tensor not in self._values or call > self._values[tensor][0]):
            self._values[tensor] = call, value

    async def _captured(self, tensor: Tensor, data: Any) -> Any:
        """The data as a value of the tensor's type that nobody changes any more."""
        if not hasattr(data, "dtype"):
            return convert_numbers(data, Leaf(tensor.name, tensor.shape, dtype_of(tensor.dtype)))
        got, shape = str(data.dtype), tuple(data.shape)
        if shape != tensor.shape or (got != tensor.dtype and not _converts(data, tensor.dtype)):
            raise TensorError(
                f"input {tensor.describe()} got {got}[{','.join(map(str, shape))}]: give a value of its shape and "
                "type, or trace again for these"
            )
        if any(backend.accepts(data) for backend in self._backends):
            return data  # immutable
        target = None if tensor.dtype.startswith("key<") else dtype_of(tensor.dtype)
        if tensor.nbytes <= INLINE_NBYTES and isinstance(data, (np.ndarray, np.generic)):
            return np.array(data, target)
        return await in_thread(lambda: np.array(data, target), "capture")

    def inputs_of(self, graph: Graph) -> list[Any]:
        """What was set for a graph's inputs, in order.

        Raises:
            TensorError: names one that was not set.
        """
        for tensor in graph.inputs:
            if tensor not in self._values:
                raise TensorError(
                    f"input {tensor.describe()} of graph {graph.name!r} is not set: give the inputs with the call, or "
                    f"set each with `await scheduler.tensor_set(tensor, data)`"
                )
        return [self._values[tensor][1] for tensor in graph.inputs]

    def ran(self, graph: Graph, evaluation: Evaluation, kept: Mapping[int, Any]) -> None:
        """Remember the newest evaluation of a graph, whose outputs will be in `kept`, by tensor id."""
        for tensor in graph.outputs:
            self._newest[tensor] = evaluation, kept

    async def get(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The newest value of a graph's output, or what was set for an input, as NumPy.

        Raises:
            TensorError: there is none, or the newest evaluation was cancelled.
            EvaluationError: the newest evaluation failed.
        """
        newest = self._newest.get(tensor)
        if newest is not None:
            evaluation, kept = newest
            await evaluation.event.wait()  # not for itself, which would cancel it with this task
            if evaluation.cancelled():
                raise TensorError(
                    f"tensor {tensor.describe()} has no value: evaluation {evaluation.id} of "
                    f"{evaluation.graph_name!r}, the newest, was cancelled; submit another"
                )
            evaluation.result()  # raises its error, which has been heard then
            value = kept[tensor.id]
        elif tensor in self._values:
            _, value = self._values[tensor]
        else:
            raise TensorError(
                f"tensor {tensor.describe()} has no value: get one of graph.outputs, after "
                "`await scheduler.graph_compute_async(graph)` with inputs that were set by `tensor_set`"
            )
        if isinstance(value, np.ndarray):
            return value.copy()
        backend = next((b for b in self._backends if b.holds(value)), self._backends[-1])
        array: np.ndarray[Any, Any] = await in_thread(lambda: backend.download(value), "download")
        return array


def _converts(data: Any, wanted: str) -> bool:
    """Whether it is NumPy's and takes the tensor's type as it would in a call: with 64 bits where JAX has only 32."""
    if not isinstance(data, (np.ndarray, np.generic)):
        return False
    try:
        return canonical_dtype(data.dtype) == wanted
    except TypeError:  # no type of JAX's
        return False
