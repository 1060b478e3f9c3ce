"""`fetch`: the values of a pytree that live on other machines, brought here."""

from __future__ import annotations

from typing import Any

import jax

from ._threads import in_thread
from .handle import Handle

__all__ = ["fetch"]


async def fetch(tree: Any) -> Any:
    """A pytree with every `Handle` in it replaced by its value, a read-only NumPy array; other leaves as they are.

    All of them travel at the same time, and the event loop is free meanwhile. A typed PRNG key arrives as its bits.

    Args:
        tree: such as the result of an evaluation whose last split ran on another machine.

    Raises:
        BackendLostError: the machine, or the process that held a value, is gone.
        BackendClosedError: the backend of a value is closed.
        Exception: what computing a value failed with.
    """
    leaves, treedef = jax.tree.flatten(tree)
    away = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Handle)}
    if not away:
        return tree

    def read() -> dict[int, Any]:
        on_their_way = {key: handle.read() for key, handle in away.items()}
        return {key: arrived() for key, arrived in on_their_way.items()}

    values = await in_thread(read, "fetch")
    return jax.tree.unflatten(treedef, [values.get(id(leaf), leaf) for leaf in leaves])
