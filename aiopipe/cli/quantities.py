"""What is typed as text: sizes, rates, durations, devices, shares."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from .outcome import UsageError

__all__ = ["copies", "each", "flops", "nbytes", "per_second", "places", "seconds", "shares", "specs"]

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([A-Za-zµ/]*)", re.IGNORECASE)
_THOUSANDS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {
    "": 1.0,
    **{f"{prefix}B": factor for prefix, factor in _THOUSANDS.items()},
    **{f"{prefix}iB": 1024.0 ** (i + 1) for i, prefix in enumerate("KMGTP")},
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _quantity(text: str, option: str, units: Mapping[str, float], example: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise UsageError(f"{option}: got {text!r}, expected a number with a unit, such as {example}")
    value = float(found[1]) * units[found[2]]
    if not math.isfinite(value):
        raise UsageError(f"{option}: got {text!r}, expected a finite number")
    return value


def nbytes(text: str, option: str) -> int:
    """``16GB``, ``512MiB`` or a number of bytes; k is 1000, Ki 1024."""
    return int(_quantity(text, option, _BYTES, "16GB or 512MiB"))


def per_second(text: str, option: str) -> float:
    """``25GB/s``; the ``/s`` may be left out."""
    value = _quantity(text.strip().removesuffix("/s"), option, _BYTES, "25GB/s")
    if value <= 0:
        raise UsageError(f"{option}: got {text!r}, expected more than 0, such as 25GB/s")
    return value


def flops(text: str, option: str) -> float:
    """``50T``, ``50TFLOPS`` or a number of operations for each second."""
    value = _quantity(re.sub(r"(?i)flops?(/s)?$", "", text.strip()), option, _THOUSANDS, "50T")
    if value <= 0:
        raise UsageError(f"{option}: got {text!r}, expected more than 0, such as 50T")
    return value


def seconds(text: str, option: str) -> float:
    """``10us``, ``1.5ms`` or seconds."""
    return _quantity(text, option, _SECONDS, "10us or 1.5ms")


def each(text: str, n: int, option: str) -> list[str]:
    """One text for all of `n` devices, or one for each, with commas between."""
    found = [part.strip() for part in text.split(",")]
    if len(found) not in (1, n):
        raise UsageError(f"{option}: got {len(found)} values for {n} devices, expected one, or one for each")
    return found * n if len(found) == 1 else found


def specs(text: str) -> tuple[str, ...]:
    """Devices, with commas between them."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise UsageError(f"--devices: got {text!r}, expected different devices, such as cpu:0,cpu:1 or sim:8")
    return found


def shares(text: str, n: int) -> Literal["auto"] | list[float]:
    """``auto``, or a share of the work for each of `n` devices."""
    if text == "auto":
        return "auto"
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != n or not all(0 <= share < math.inf for share in found) or not any(found):
        raise UsageError(f"--split: got {text!r}, expected auto, or a share for each of {n} devices, such as 2,1")
    return found


def places(texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """``GLOB=DEVICE`` each: which weights go where; the first glob that matches counts."""
    found = {}
    for text in texts:
        glob, _, device = text.rpartition("=")
        if not glob or device not in names:
            raise UsageError(f"--place: got {text!r}, expected GLOB=DEVICE with a device of {', '.join(names)}")
        found[glob] = device
    return found


def copies(text: str) -> Literal["auto"] | int:
    """``auto``, or how many evaluations are in flight."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--n-copies: got {text!r}, expected auto or a whole number of at least 1")
    return int(text)
