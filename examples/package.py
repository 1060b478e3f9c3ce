"""Packages that models come in, or are read with."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["folder_of", "has_failed", "how_to_install"]


def how_to_install(package: str) -> str:
    """What to do about a package that is missing; `package` is ``name==version``."""
    return f"install it with: pip install --no-deps {package}"


def folder_of(package: str, what: str) -> Path:
    """The folder of an installed package, found without importing it: its code may need what its files do not.

    Args:
        package: ``name==version``.
        what: for the message, such as ``"the model comes"``.

    Raises:
        FileNotFoundError: it is missing.
    """
    spec = importlib.util.find_spec(package.partition("==")[0].replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            f"{what} in the package {package}, which is not installed; {how_to_install(package)}"
        )
    return Path(spec.submodule_search_locations[0])


def has_failed(error: BaseException) -> bool:
    """Whether a package has failed; else the program is to end. Packages in Rust panic with what is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
