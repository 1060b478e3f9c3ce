"""The user's function: where it is, and JAX made ready before it is imported."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from .outcome import FunctionFailed, UsageError, users_line

__all__ = ["Target", "find", "start_jax"]

MAX_CPUS = 1024


def start_jax(specs: Sequence[str], *, at_least: int = 0) -> None:
    """Have JAX make as many CPU devices as these specs name. Before the user's module, which may start JAX.

    Raises:
        UsageError: they are too many, or JAX has started with fewer.
    """
    cpus = (re.fullmatch(r"cpu(?::(\d+))?", spec) for spec in specs)
    wanted = max((int(match[1] or 0) + 1 for match in cpus if match), default=0)
    wanted = max(wanted, at_least)
    if wanted > MAX_CPUS:
        raise UsageError(f"got {wanted} CPU devices, expected at most {MAX_CPUS}")
    config: Any = jax.config  # untyped in some versions of JAX
    if wanted <= max(1, config.jax_num_cpu_devices):
        return
    try:
        config.update("jax_num_cpu_devices", wanted)
    except RuntimeError as error:
        if len(jax.local_devices(backend="cpu")) < wanted:
            raise UsageError(f"JAX has started with fewer than {wanted} CPU devices: {error}") from None


@dataclass(frozen=True, slots=True)
class Target:
    """What ``module:function`` names.

    Attributes:
        module: the module's name.
        fn: the function.
    """

    module: str
    fn: Callable[..., Any]

    def has(self, name: str) -> bool:
        """Whether the module has something of that name."""
        return hasattr(sys.modules[self.module], name)

    def beside(self, text: str, option: str) -> Any:
        """What ``name``, beside the function, or ``module:name`` is."""
        if ":" in text:
            return _attribute(*_parts(text, option), option)[1]
        return _attribute(self.module, text, option)[1]


def find(text: str) -> Target:
    """The function that ``module:function`` or ``path/to/file.py:function`` names.

    Raises:
        UsageError: there is no such module, or no such function in it.
        FunctionFailed: the module raised when it was imported.
    """
    module, fn = _attribute(*_parts(text, "FUNCTION"), "FUNCTION")
    if not callable(fn):
        raise UsageError(f"FUNCTION: {text} is a {type(fn).__name__}, expected a function of (weights, *inputs)")
    return Target(module, fn)


def _parts(text: str, option: str) -> tuple[str, str]:
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise UsageError(f"{option}: got {text!r}, expected module:name, such as my_model:model or my_model.py:model")
    return module, name


def _attribute(module: str, name: str, option: str) -> tuple[str, Any]:
    imported = sys.modules.get(module) or _imported(module, option)
    try:
        return imported.__name__, functools.reduce(getattr, name.split("."), imported)
    except AttributeError:
        has = sorted(known for known in vars(imported) if not known.startswith("_"))
        raise UsageError(f"{option}: {module!r} has no {name!r}; it has {', '.join(has) or 'nothing'}") from None


def _imported(module: str, option: str) -> ModuleType:
    if module.endswith(".py"):
        path = Path(module)
        if not path.is_file():
            raise UsageError(f"{option}: there is no file {module!r}")
        folder, module = str(path.resolve().parent), path.stem
    else:
        folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        # Its own name, or that of a package it is in; anything else is missing inside of it.
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"{option}: there is no module {error.name!r}, neither installed nor in this folder"
            ) from None
        where = users_line(error)
        raise FunctionFailed(
            f"importing {module!r} raised {type(error).__name__}{f' at {where}' if where else ''}: {error}"
        ) from error
