"""A plan in Graphviz's DOT language. Pure: a plan in, a string out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..graph import Kind
from .plan_text import Planned, bytes_text
from .split import HOST

__all__ = ["plan_dot"]

_NAMES_SHOWN = 3
"""An edge names so many of its values; the others it counts."""


def plan_dot(plan: Planned) -> str:
    """The splits and what travels between them, for ``dot -Tsvg``.

    A cluster for each backend with its splits; a solid edge for what is copied, with its bytes; a
    dashed one for what the next split finds on its own backend; the graph's inputs and outputs, where
    there are any.
    """
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: Planned) -> Iterator[str]:
    graph = plan.graph
    yield f"digraph {_quoted(graph.name)} {{"
    yield "  rankdir=LR;"
    yield "  node [shape=box];"
    for b, (device, size) in enumerate(zip(plan.devices, plan.sizes, strict=True)):
        splits = [split for split in plan.splits if split.backend == b]
        if not splits:
            continue
        about = f"weights {bytes_text(size.weights_nbytes)}, each copy {bytes_text(size.copy_nbytes)}"
        yield f"  subgraph {_quoted(f'cluster_{b}')} {{"
        yield f"    label={_quoted(device.name, about)};"
        for split in splits:
            first = graph.nodes[split.nodes[0]]
            n = len(split.nodes)
            what = f"#{split.index}: {n} {'node' if n == 1 else 'nodes'}"
            yield f"    split_{split.index} [label={_quoted(what, first.source or first.name)}];"
        yield "  }"
    edges = _edges(plan)
    if any(src == "inputs" for src, _, _ in edges):
        yield f"  inputs [label={_quoted('inputs')}, shape=ellipse];"
    if any(dst == "outputs" for _, dst, _ in edges):
        yield f"  outputs [label={_quoted('outputs')}, shape=ellipse];"
    for (src, dst, copied), tensors in edges.items():
        nbytes = sum(graph.tensors[t].nbytes for t in tensors)
        style = "" if copied else ", style=dashed"
        yield f"  {src} -> {dst} [label={_quoted(bytes_text(nbytes), _names(plan, tensors))}{style}];"
    yield "}"


def _names(plan: Planned, tensors: Sequence[int]) -> str:
    shown = [plan.graph.tensors[t].name for t in tensors[:_NAMES_SHOWN]]
    more = len(tensors) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _edges(plan: Planned) -> dict[tuple[str, str, bool], list[int]]:
    """(from, to, whether it is copied) -> ids of the tensors that go that way."""
    graph = plan.graph
    edges: dict[tuple[str, str, bool], list[int]] = {}
    here: dict[tuple[int, int], int] = {}  # (tensor, backend) -> split that made it, or brought it, there

    def add(src: str, dst: str, copied: bool, tensor: int) -> None:
        edges.setdefault((src, dst, copied), []).append(tensor)

    for split in plan.splits:
        me = f"split_{split.index}"
        sources = {copy.tensor: copy.src for copy in split.copies}
        for t in split.inputs:
            if t in sources:
                src = sources[t]
                add("inputs" if src == HOST else f"split_{here[t, src]}", me, True, t)
                here[t, split.backend] = split.index
            elif graph.tensors[t].kind is not Kind.WEIGHT:
                add(f"split_{here[t, split.backend]}", me, False, t)
        here.update(((t, split.backend), split.index) for t in split.outputs)
    made_by = graph.producers()
    for tensor in graph.outputs:
        maker = made_by[tensor.id]
        if maker >= 0:
            add(f"split_{here[tensor.id, plan.assignment.node_backend[maker]]}", "outputs", False, tensor.id)
        elif tensor.kind is not Kind.WEIGHT:
            add("inputs", "outputs", False, tensor.id)
    return edges


def _quoted(*lines: str) -> str:
    """A DOT string; several lines are centred under each other."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
