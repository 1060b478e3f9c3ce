"""``aiopipe devices``: what there is to run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from ..devices.base import Device
from ..registry import devices, registered_backends
from ..sched.plan_text import bytes_text
from .outcome import Failure

__all__ = ["Found", "find_devices"]


@dataclass(frozen=True, slots=True)
class Found:
    """The devices, and the backends that can be named besides."""

    devices: tuple[Device, ...]
    backends: tuple[str, ...]
    failure: Failure | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that docs/cli.md lists."""
        return {
            "jax": jax.__version__,
            "devices": [
                {
                    "name": device.name,
                    "type": device.props.type.value,
                    "memory_nbytes": device.props.memory_nbytes,
                    "memory_kinds": [kind.memory_kind for kind in device.buffer_types()],
                    **device.capabilities._asdict(),
                    "flops_per_s": device.props.flops_per_s,
                    "bytes_per_s": device.props.bytes_per_s,
                }
                for device in self.devices
            ],
            "backends": list(self.backends),
        }

    def show(self, console: Console) -> None:
        """A table of devices, and the names that a spec may begin with."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("device", "type", "memory", "memory kinds", "asynchronous", "assumed speed"):
            table.add_column(heading)
        for device in self.devices:
            props = device.props
            table.add_row(
                device.name,
                props.type.value,
                "?" if props.memory_nbytes is None else bytes_text(props.memory_nbytes),
                ", ".join(kind.memory_kind for kind in device.buffer_types()),
                "yes" if props.is_async else "no",
                f"{props.flops_per_s / 1e12:g} TFLOPS, {bytes_text(props.bytes_per_s)}/s",
            )
        console.print(table)
        console.print(f"backends: {', '.join(self.backends)}; jax {jax.__version__}", soft_wrap=True)


def find_devices() -> Found:
    """Ask every registered backend."""
    return Found(devices(), registered_backends())
