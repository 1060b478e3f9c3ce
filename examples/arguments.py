"""What the commands of the examples read from their command lines in the same way."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

__all__ = ["MAX_CPUS", "check_devices", "n_cpus", "names", "positive", "ratios"]

MAX_CPUS = 64


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of at least 1")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Devices, with commas between them."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found) or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different devices, such as cpu:0,cpu:1")
    return found


def ratios(text: str, words: Sequence[str] = ("auto",)) -> str | tuple[float, ...]:
    """One of some words, or a share for each device."""
    if text in words:
        return text
    try:
        shares = tuple(map(float, text.split(",")))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share < float("inf") for share in shares):
        expected = " or ".join(words)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}, or a ratio for each device, such as 2,1")
    return shares


def n_cpus(devices: Sequence[str]) -> int:
    """How many CPU devices JAX has to make for these; 0 if none is named."""
    cpus = (re.fullmatch(r"cpu(?::(\d+))?", device) for device in devices)
    return max((int(match[1] or 0) + 1 for match in cpus if match), default=0)


def check_devices(parser: argparse.ArgumentParser, devices: Sequence[str], split: str | Sequence[float]) -> None:
    """Exit with a message where devices and split make no sense together."""
    if n_cpus(devices) > MAX_CPUS:
        parser.error(f"--devices asks for {n_cpus(devices)} CPU devices; at most {MAX_CPUS} make sense")
    if not isinstance(split, str) and len(split) != len(devices):
        parser.error(f"--split has {len(split)} ratios for {len(devices)} devices; give one for each, or auto")
