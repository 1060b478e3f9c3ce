"""Where in the user's program an equation was written."""

from __future__ import annotations

import functools
import os
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

__all__ = ["is_library_file", "is_library_function", "python_frames", "source_line", "stack_frames"]

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OWN_FILES = frozenset(_PACKAGE + name for name in ("trace.py", "_jaxpr.py"))
_SITE = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_JAX_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(jax.__file__)))
_JAX = tuple(os.path.join(_JAX_PARENT, name) + os.sep for name in ("jax", "jaxlib"))
_LIBRARY = (*_SITE, *_JAX, _STDLIB, "<frozen")


def is_library_file(path: str) -> bool:
    """Whether a source file belongs to Python or an installed package, so not to the user's own program."""
    return path.startswith(_LIBRARY)


def source_line(eqn: Any) -> str:
    """Where the user wrote an equation, e.g. ``"model.py:12 (attention)"``; ``""`` if unknown.

    The innermost line of the user's own program within the traced function; failing that, of a
    package other than JAX.
    """
    return _line_of(getattr(getattr(eqn, "source_info", None), "traceback", None))


@functools.lru_cache(maxsize=4096)  # operations of one line, and of one loop, have equal tracebacks
def _line_of(traceback: Any) -> str:
    package = ""
    for code, line in stack_frames(traceback):
        owner = _owner(code.co_filename)
        if owner == "tracer":  # what is further out called it
            break
        if owner == "user" or (owner == "package" and not package):
            function = code.co_qualname.rpartition("<locals>.")[2]
            found = f"{os.path.basename(code.co_filename)}:{line()} ({function})"
            if owner == "user":
                return found
            package = found
    return package


@functools.lru_cache(maxsize=4096)
def _owner(path: str) -> str:
    if path in _OWN_FILES:
        return "tracer"
    if not path.startswith(_LIBRARY):
        return "user"
    return "package" if path.startswith(_SITE) and not path.startswith(_JAX) else "python or jax"


def is_library_function(jaxpr: Any) -> bool:
    """Whether a jaxpr was traced from a function of an installed package.

    JAX keeps such traces, so the lines in them may be those of another caller.
    """
    info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
    path = getattr(info, "func_filename", None)
    return isinstance(path, str) and is_library_file(path)


def stack_frames(traceback: Any) -> Iterator[tuple[types.CodeType, Callable[[], int]]]:
    """The Python frames of one of JAX's tracebacks, innermost first: code, and a function for the line."""
    if traceback is None:
        return iter(())
    if hasattr(traceback, "raw_frames") and hasattr(traceback, "code_addr2line"):
        return _raw_frames(traceback)
    return python_frames(traceback)


def _raw_frames(traceback: Any) -> Iterator[tuple[types.CodeType, Callable[[], int]]]:
    for code, position in zip(*traceback.raw_frames(), strict=True):
        yield code, functools.partial(traceback.code_addr2line, code, position)


def python_frames(traceback: Any) -> Iterator[tuple[types.CodeType, Callable[[], int]]]:
    """`stack_frames` of JAX's traceback by way of Python's; slower."""
    frames = []
    tb: types.TracebackType | None = traceback.as_python_traceback()
    while tb is not None:
        frames.append((tb.tb_frame.f_code, functools.partial(int, tb.tb_lineno)))
        tb = tb.tb_next
    return reversed(frames)
