"""`Handle`: a value that lives on another machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from ._threads import in_thread

__all__ = ["Handle"]


class Handle(ABC):
    """A value on another machine: its type is known here, its elements are not. Immutable.

    `np.asarray` reads it and blocks until it is here; on an event loop, ``await handle.fetch()``, or
    `aiopipe.fetch` for a whole pytree.

    Attributes:
        shape: dimensions.
        dtype: element type.
    """

    __slots__ = ()

    shape: tuple[int, ...]
    dtype: Any

    @abstractmethod
    def read(self) -> Callable[[], np.ndarray[Any, Any]]:
        """Ask for the value; what it returns waits for it. Several can be on their way at once.

        A typed PRNG key comes as its bits.
        """

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value, read-only. Blocks.

        Raises:
            BackendLostError: the machine, or the process that held it, is gone.
            BackendClosedError: its backend is closed.
            Exception: what computing it failed with.
        """
        return self.read()()

    async def fetch(self) -> np.ndarray[Any, Any]:
        """`numpy`, without blocking the event loop."""
        return await in_thread(self.numpy, "fetch")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        value = self.numpy()
        return np.array(value, dtype) if copy or (dtype is not None and dtype != value.dtype) else value
