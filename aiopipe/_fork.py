"""Forked processes: what was open before a fork stays with the parent.

A fork copies all memory, but only the thread that asked for it. XLA's threads and aiopipe's are not there in the child:
what waits for them waits for ever, and what they had locked stays locked. The selector of an event loop is even shared:
whoever lets go of a descriptor in the child takes it from the parent. So the child may use nothing of it, and closing
it there does nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

from .errors import ForkedError

__all__ = ["ADVICE", "Origin", "hint", "in_child"]

ADVICE = "start processes by 'spawn' or 'forkserver' instead, or fork before JAX and aiopipe are used"
"""What to do, for messages."""


class Origin:
    """Where something was opened.

    Attributes:
        forked: in a process that this one was forked from.
    """

    __slots__ = ("__weakref__", "forked")

    def __init__(self) -> None:
        self.forked = False
        _here.add(self)

    def check(self, what: str) -> None:
        """Raise `ForkedError` in a child.

        Args:
            what: was opened, for the message.
        """
        if self.forked:
            raise ForkedError(
                f"{what} was opened before this process was forked: its threads, and those of JAX, are in the parent "
                f"only, and this would wait for them for ever; {ADVICE}"
            )


_here: weakref.WeakSet[Origin] = weakref.WeakSet()
_is_child = False


def hint() -> str:
    """What to add to an error about an event loop, which may be the parent's."""
    return "; this process was forked: what was open before that belongs to the parent's loop" if _is_child else ""


def in_child(call: Callable[[], None]) -> None:
    """Have every child that is forked from now on call this first, where there are forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)


def _mark() -> None:
    global _is_child
    _is_child = True
    for origin in list(_here):
        origin.forked = True
    _here.clear()


in_child(_mark)
