"""What a search found and how the work was spread, as values, as JSON and as text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .text import Passage

__all__ = ["Hit", "Report", "SplitRow", "layers_of", "nearest", "split_rows"]

_LAYER = re.compile(r"(?:^|/)layers/(\d+)/")


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage near the query; `score` is the cosine of the angle between the two."""

    score: float
    topic: str
    text: str


@dataclass(frozen=True, slots=True)
class SplitRow:
    """A split of the plan.

    Attributes:
        device: where it runs.
        layers: which parts of the model it holds weights of, e.g. ``"embeddings, layers 0-2"``.
        n_nodes: how many operations it has.
        weight_bytes: its weights.
        input_bytes: what is brought to it for each batch.
    """

    device: str
    layers: str
    n_nodes: int
    weight_bytes: int
    input_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run.

    Attributes:
        passages: how many were embedded.
        passages_per_s: without compiling.
        compile_s: compiling, one first evaluation of each shape included.
        n_shapes: how many shapes were compiled.
        n_batches: how many batches were streamed.
        max_abs_err_vs_reference: largest difference to the embeddings of sentence-transformers.
        query: the text searched for.
        results: the nearest passages, best first.
        devices: as asked for.
        n_copies: batches in flight at most.
        busy: for each device the share of time in which it computed.
        plan: the splits, in order.
    """

    passages: int
    passages_per_s: float
    compile_s: float
    n_shapes: int
    n_batches: int
    max_abs_err_vs_reference: float
    query: str
    results: tuple[Hit, ...]
    devices: tuple[str, ...]
    n_copies: int
    busy: dict[str, float]
    plan: tuple[SplitRow, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return asdict(self)

    def __str__(self) -> str:
        seconds = self.passages / self.passages_per_s
        lines = [
            f"{self.passages} passages in {self.n_batches} batches, {self.n_copies} in flight: "
            f"{seconds:.1f} s, {self.passages_per_s:.1f} passages/s",
            f"compiling {self.n_shapes} shapes took {self.compile_s:.1f} s before",
            f"largest difference to the reference: {self.max_abs_err_vs_reference:.1e}",
            "",
        ]
        lines += _table(
            ("split", "device", "layers", "operations", "weights", "moved per batch"),
            [
                (f"#{i}", s.device, s.layers, str(s.n_nodes), _size(s.weight_bytes), _size(s.input_bytes))
                for i, s in enumerate(self.plan)
            ],
        )
        lines.append("")
        lines += _table(
            ("device", "weights", "busy"),
            [
                (name, _size(sum(s.weight_bytes for s in self.plan if s.device == name)), f"{share:.0%}")
                for name, share in self.busy.items()
            ],
        )
        lines += ["", f"nearest to {self.query!r}:"]
        for hit in self.results:
            lines.append(f"  {hit.score:.3f}  {hit.topic}")
            lines += textwrap.wrap(hit.text, 100, initial_indent=" " * 9, subsequent_indent=" " * 9)
        return "\n".join(lines)


def nearest(query: np.ndarray, embeddings: np.ndarray, passages: Sequence[Passage], top: int) -> tuple[Hit, ...]:
    """The passages most like the query.

    Args:
        query: (d,), of length 1.
        embeddings: (n, d), each of length 1.
        passages: the n passages.
        top: how many to return.

    Returns:
        At most `top` hits, best first; equal scores in the order of the passages.
    """
    scores = embeddings @ query
    best = np.argsort(-scores, kind="stable")[:top]
    return tuple(Hit(float(scores[i]), passages[i].topic, passages[i].text) for i in best)


def layers_of(names: Iterable[str]) -> str:
    """Sums up paths of weights, e.g. ``"embeddings, layers 0-2"``."""
    others: dict[str, None] = {}
    layers: set[int] = set()
    for name in names:
        if match := _LAYER.search(name):
            layers.add(int(match[1]))
        else:
            others[name.partition("/")[0]] = None
    parts = list(others)
    if layers:
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        parts.append("layers " + " ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in runs))
    return ", ".join(parts) or "–"


def split_rows(plan: Any) -> tuple[SplitRow, ...]:
    """What an aiopipe plan says about its splits."""
    tensors = plan.graph.tensors
    weight_ids = {tensor.id for tensor in plan.graph.weights}
    rows = []
    for split in plan.splits:
        held = [tensors[i] for i in split.inputs if i in weight_ids]
        rows.append(
            SplitRow(
                device=plan.devices[split.backend].name,
                layers=layers_of(tensor.name for tensor in held),
                n_nodes=len(split.nodes),
                weight_bytes=sum(tensor.nbytes for tensor in held),
                input_bytes=sum(copy.nbytes for copy in split.copies),
            )
        )
    return tuple(rows)


def _size(nbytes: int) -> str:
    if nbytes < 1000:
        return f"{nbytes} B"
    return f"{nbytes / 1e3:.1f} KB" if nbytes < 1e6 else f"{nbytes / 1e6:.1f} MB"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    table = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
