"""A plan as text, in three levels of detail. Pure: a plan in, a string out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

from ..devices.base import Device
from ..errors import TensorError
from ..graph import Graph, Kind
from .alloc import BackendSize
from .assign import Assignment
from .split import HOST, Split

__all__ = ["Detail", "Planned", "bytes_text", "plan_text", "split_rows"]

Detail = Literal[0, 1, 2]


class Planned(Protocol):
    """What printing reads of a `Plan`, which is made of more than this file may know."""

    @property
    def graph(self) -> Graph: ...

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def assignment(self) -> Assignment: ...

    @property
    def splits(self) -> tuple[Split, ...]: ...

    @property
    def weights(self) -> tuple[frozenset[int], ...]: ...

    @property
    def sizes(self) -> tuple[BackendSize, ...]: ...


def plan_text(plan: Planned, detail: Detail = 1) -> str:
    """A plan for people to read.

    Args:
        plan: what to print.
        detail: 0 is one line: how much, where. 1 adds a table of the splits (backend, nodes, the
            user's line, inputs, bytes moved, weights, causes) and the bytes for each backend. 2 adds
            every leaf, node and copy with its backend and cause.

    Raises:
        TensorError: there is no such level.
    """
    if detail == 0:
        return _summary(plan)
    if detail == 1:
        return "\n".join(_table(plan))
    if detail == 2:
        return "\n".join([*_table(plan), *_leaves(plan), *_nodes(plan)])
    raise TensorError(f"detail={detail!r} of the plan of {plan.graph.name!r}: expected 0, 1 or 2")


def bytes_text(n: float) -> str:
    """A size for people, in powers of 1000: ``"8 B"``, ``"1.5 MB"``."""
    for unit in ("B", "KB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.0f} GB" if n >= 100 else f"{n:.1f} GB"


def _summary(plan: Planned) -> str:
    counts = [sum(split.backend == b for split in plan.splits) for b in range(len(plan.devices))]
    where = ", ".join(f"{n} on {device.name}" for n, device in zip(counts, plan.devices, strict=True) if n)
    copies = [copy for split in plan.splits for copy in split.copies]
    moved = sum(copy.nbytes for copy in copies if copy.src != HOST)
    from_host = sum(copy.nbytes for copy in copies if copy.src == HOST)
    return (
        f"plan of {plan.graph.name!r}: {len(plan.graph.nodes)} nodes, {len(plan.splits)} splits ({where or 'none'}); "
        f"each evaluation moves {bytes_text(moved)} between backends and {bytes_text(from_host)} from the host"
    )


def _table(plan: Planned) -> Iterator[str]:
    """Splits, backends, nodes, inputs, bytes moved, causes; then bytes for each backend."""
    yield f"plan of {plan.graph.name!r}: {len(plan.graph.nodes)} nodes, {len(plan.splits)} splits"
    yield from _aligned(split_rows(plan))
    for device, size in zip(plan.devices, plan.sizes, strict=True):
        temp = f", temporaries {bytes_text(size.temp_nbytes)}" if size.temp_nbytes else ""
        weights, copy = bytes_text(size.weights_nbytes), bytes_text(size.copy_nbytes)
        yield f"{device.name}: weights {weights}, each copy {copy}{temp}"


def split_rows(plan: Planned) -> list[tuple[str, ...]]:
    """A table of the splits, its head first."""
    graph, tensors = plan.graph, plan.graph.tensors
    rows: list[tuple[str, ...]] = [("split", "backend", "nodes", "from", "inputs", "moved", "weights", "causes")]
    for split in plan.splits:
        causes: dict[str, int] = {}
        for i in split.nodes:
            cause = _cause(plan, split, i)
            causes[cause] = causes.get(cause, 0) + 1
        held = [t for t in split.inputs if tensors[t].kind is Kind.WEIGHT]
        rows.append(
            (
                f"#{split.index}",
                plan.devices[split.backend].name,
                str(len(split.nodes)),
                graph.nodes[split.nodes[0]].source or graph.nodes[split.nodes[0]].name,
                str(len(split.inputs) - len(held)),
                bytes_text(sum(c.nbytes for c in split.copies)),
                f"{len(held)} ({bytes_text(sum(tensors[t].nbytes for t in held))})",
                " ".join(f"{cause}:{n}" for cause, n in sorted(causes.items(), key=lambda item: -item[1])),
            )
        )
    return rows


def _leaves(plan: Planned) -> Iterator[str]:
    """Where inputs and weights live, and where weights are copied when the plan is loaded."""
    graph, assignment = plan.graph, plan.assignment
    names = [device.name for device in plan.devices]
    rows = [("leaf", "kind", "backends", "cause", "size")]
    for tensor in graph.leaves:
        homes = assignment.leaf_backends[tensor.id]
        held = [names[b] for b in homes]
        held += [f"copied to {names[b]}" for b, ids in enumerate(plan.weights) if tensor.id in ids and b not in homes]
        rows.append(
            (
                tensor.describe(),
                tensor.kind.value,
                ", ".join(held) or "-",
                assignment.leaf_cause[tensor.id] or "-",
                bytes_text(tensor.nbytes),
            )
        )
    yield ""
    yield from _aligned(rows)


def _nodes(plan: Planned) -> Iterator[str]:
    """Every copy and node, split by split; then the nodes that no split has."""
    graph, tensors = plan.graph, plan.graph.tensors
    seen: set[int] = set()
    for split in plan.splits:
        name = plan.devices[split.backend].name
        after = f", after {', '.join(f'#{d}' for d in split.depends)}" if split.depends else ""
        yield ""
        yield f"split #{split.index} on {name}{after}"
        rows = []
        for copy in split.copies:
            src = "the host" if copy.src == HOST else plan.devices[copy.src].name
            what = tensors[copy.tensor].describe()
            rows.append(("copy", what, name, f"from {src}", bytes_text(copy.nbytes), ""))
        for i in split.nodes:
            node = graph.nodes[i]
            made = ", ".join(f"{tensors[t].dtype}[{','.join(map(str, tensors[t].shape))}]" for t in node.outputs)
            rows.append(("node", node.name, name, _cause(plan, split, i), made or "-", node.source))
        yield from (f"  {line}" for line in _aligned(rows))
        seen.update(split.nodes)
    left_out = [node for node in graph.nodes if node.index not in seen]
    if left_out:
        yield ""
        yield "nodes that nothing needs"
        yield from (
            f"  {line}" for line in _aligned([("node", n.name, n.source or "no source line") for n in left_out])
        )


def _cause(plan: Planned, split: Split, node: int) -> str:
    return "recomputed" if node in split.recomputed else plan.assignment.node_cause[node]


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
