"""What ``aiopipe plan`` found out: for people, and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..graph import Kind, Tensor
from ..sched.plan import Plan
from ..sched.plan_text import bytes_text
from ..sched.split import HOST
from .estimate import Estimate, split_seconds
from .outcome import Failure
from .words import number, percent, seconds_text

__all__ = ["Fit", "Planned"]


@dataclass(frozen=True, slots=True)
class Fit:
    """What has room.

    Attributes:
        n_copies: what was asked for, or found by ``auto``.
        fits: whether every device has room for it.
        largest_n_copies: with how many it would still fit; 0 for none, None where no device has a limit.
        devices_needed: how many such devices would have room, where these have not and they are simulated.
    """

    n_copies: int
    fits: bool
    largest_n_copies: int | None
    devices_needed: int | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what it would come to.

    Attributes:
        plan: what would run where.
        sized: whether temporaries are known: it was compiled, or there are none.
        limits: for each device the bytes that it may use, or None.
        estimate: what streaming comes to.
        by_copies: the same for other `n_copies`.
        fit: what has room.
        detail: how much of the plan to print.
        failure: that it does not fit.
    """

    plan: Plan
    sized: bool
    limits: tuple[int | None, ...]
    estimate: Estimate
    by_copies: tuple[Estimate, ...]
    fit: Fit
    detail: Literal[0, 1, 2]
    failure: Failure | None

    def to_json(self) -> dict[str, Any]:
        """The fields that docs/cli.md lists."""
        graph = self.plan.graph
        return {
            "n_copies": self.fit.n_copies,
            "temporaries_known": self.sized,
            "graph": {
                "name": graph.name,
                "nodes": len(graph.nodes),
                "weights": len(graph.weights),
                "weights_nbytes": sum(tensor.nbytes for tensor in graph.weights),
                "inputs": [_tensor(tensor) for tensor in graph.inputs],
                "outputs": [_tensor(tensor) for tensor in graph.outputs],
            },
            "devices": self._devices(),
            "splits": self._splits(),
            "estimate": {
                **{name: value for name, value in asdict(self.estimate).items() if name not in ("n_copies", "seconds")},
                "per_s": _finite(self.estimate.per_s),
                "gain": self.estimate.gain,
            },
            "by_n_copies": [
                {
                    "n_copies": e.n_copies,
                    "interval_s": e.interval_s,
                    "steady_bubble": e.steady_bubble,
                    "fits": self._fits(e.n_copies),
                }
                for e in self.by_copies
            ],
            "fit": asdict(self.fit),
        }

    def _devices(self) -> list[dict[str, Any]]:
        n, interval_s = self.fit.n_copies, self.estimate.interval_s
        return [
            {
                "name": device.name,
                "type": device.props.type.value,
                "splits": sum(split.backend == b for split in self.plan.splits),
                "seconds": seconds,
                "busy": seconds / interval_s if interval_s > 0 else 0.0,
                "weights_nbytes": size.weights_nbytes,
                "state_nbytes": size.state_nbytes,
                "copy_nbytes": size.copy_nbytes,
                "temporaries_nbytes": size.temp_nbytes,
                "total_nbytes": size.total(n),
                "limit_nbytes": limit,
                "fits": limit is None or size.total(n) <= limit,
            }
            for b, (device, size, limit, seconds) in enumerate(
                zip(self.plan.devices, self.plan.sizes, self.limits, self.estimate.seconds, strict=True)
            )
        ]

    def _splits(self) -> list[dict[str, Any]]:
        graph, devices = self.plan.graph, self.plan.devices
        found = []
        for split, seconds in zip(self.plan.splits, split_seconds(self.plan), strict=True):
            held = [graph.tensors[t] for t in split.inputs if graph.tensors[t].kind is Kind.WEIGHT]
            first = graph.nodes[split.nodes[0]]
            found.append(
                {
                    "index": split.index,
                    "device": devices[split.backend].name,
                    "nodes": len(split.nodes),
                    "first_node": first.name,
                    "source": first.source,
                    "seconds": seconds,
                    "weights_nbytes": sum(tensor.nbytes for tensor in held),
                    "from_devices_nbytes": sum(nbytes for _, src, nbytes in split.brings if src != HOST),
                    "from_host_nbytes": sum(nbytes for _, src, nbytes in split.brings if src == HOST),
                    "depends": list(split.depends),
                }
            )
        return found

    def _fits(self, n_copies: int) -> bool:
        largest = self.fit.largest_n_copies
        return largest is None or n_copies <= largest

    def show(self, console: Console) -> None:
        """The plan, then tables of devices and of `n_copies`, then what it comes to."""
        console.print(self.plan.text(self.detail), soft_wrap=True)
        if self.detail == 0:
            console.print(self._sentence(), soft_wrap=True)
            return
        console.print()
        console.print(self._device_table())
        console.print()
        console.print(self._copies_table())
        console.print()
        console.print(self._sentence(), soft_wrap=True)

    def _device_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("device", "splits", "time", "busy", "weights", "state", "each copy", "temporaries"):
            table.add_column(heading, justify="left" if heading == "device" else "right")
        table.add_column(f"total, {self.fit.n_copies} in flight", justify="right")
        table.add_column("may use", justify="right")
        for row in self._devices():
            temporaries = bytes_text(row["temporaries_nbytes"]) if self.sized else "?"
            table.add_row(
                row["name"],
                str(row["splits"]),
                seconds_text(row["seconds"]),
                percent(row["busy"]),
                *(bytes_text(row[f"{name}_nbytes"]) for name in ("weights", "state", "copy")),
                temporaries,
                bytes_text(row["total_nbytes"]),
                Text.assemble(
                    "" if row["fits"] else ("does not fit ", "red"),
                    "?" if row["limit_nbytes"] is None else bytes_text(row["limit_nbytes"]),
                ),
            )
        return table

    def _copies_table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("in flight", "results/s", "bubble", "fits"):
            table.add_column(heading, justify="right")
        for e in self.by_copies:
            table.add_row(
                str(e.n_copies),
                number(e.per_s),
                percent(e.steady_bubble),
                "yes" if self._fits(e.n_copies) else Text("no", "red"),
            )
        return table

    def _sentence(self) -> str:
        e = self.estimate
        return (
            f"estimated: one evaluation takes {seconds_text(e.alone_s)}; streamed, there is a result every "
            f"{seconds_text(e.interval_s)}, {e.gain:.2f} x what the devices would do one after the other. "
            f"Bubble {percent(e.bubble)} over {e.evaluations} evaluations, {percent(e.steady_bubble)} once the "
            "pipeline is full."
        )


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "nbytes": tensor.nbytes}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
