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
        self._values: weakref.WeakKeyDictionary[Tensor, Any] = weakref.WeakKeyDictionary()
        self._newest: weakref.WeakKeyDictionary[Tensor, tuple[Evaluation, Mapping[int, Any]]]
        self._newest = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Forget all."""
        self._values.clear()
        self._newest.clear()

    async def set(self, tensor: Tensor, data: Any) -> None:
        """Set a graph's input; NumPy data is copied.

        Raises:
            TensorError: it is no input, or the data is of another shape or type.
        """
        if tensor.kind is not Kind.INPUT:
            raise TensorError(
                f"tensor {tensor.describe()} is a {tensor.kind.value}, not an input of a graph: set one of graph.inputs"
            )
        if not hasattr(data, "dtype"):
            self._values[tensor] = convert_numbers(data, Leaf(tensor.name, tensor.shape, dtype_of(tensor.dtype)))
            return
        got, shape = str(data.dtype), tuple(data.shape)
        if shape != tensor.shape or (got != tensor.dtype and not _converts(data, tensor.dtype)):
            raise TensorError(
                f"input {tensor.describe()} got {got}[{','.join(map(str, shape))}]: give a value of its shape and "
                "type, or trace again for these"
            )
        target = None if tensor.dtype.startswith("key<") else dtype_of(tensor.dtype)
        if any(backend.accepts(data) for backend in self._backends):
            self._values[tensor] = data  # immutable
        elif tensor.nbytes <= INLINE_NBYTES and isinstance(data, (np.ndarray, np.generic)):
            self._values[tensor] = np.array(data, target)
        else:
            self._values[tensor] = await in_thread(lambda: np.array(data, target), "capture")

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
        return [self._values[tensor] for tensor in graph.inputs]

    def ran(self, graph: Graph, evaluation: Evaluation, kept: Mapping[int, Any]) -> None:
        """Remember the newest evaluation of a graph, whose outputs will be in `kept`, by tensor id."""
        for tensor in graph.outputs:
            self._newest[tensor] = evaluation, kept

    async def get(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The newest value of a graph's output, or what was set for an input, as NumPy.

        Raises:
            TensorError: there is none.
            EvaluationError: the newest evaluation failed.
        """
        newest = self._newest.get(tensor)
        if newest is not None:
            evaluation, kept = newest
            await evaluation.event
            value = kept[tensor.id]
        elif tensor in self._values:
            value = self._values[tensor]
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
