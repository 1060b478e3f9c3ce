"""A plan as HTML, for notebooks. Pure: a plan in, a string out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..timeline_draw import COLOURS
from .plan_text import Planned, bytes_text, plan_text, split_rows

__all__ = ["plan_html"]

MOST = 100
"""Rows of splits; a browser that is shown thousands of them is no help to anybody."""

_CELL = "padding:2px 10px;text-align:left"


def plan_html(plan: Planned) -> str:
    """Which splits there are, where they run, what travels; and the bytes for each backend.

    It asks for nothing from elsewhere, and every name in it is escaped.
    """
    names = [device.name for device in plan.devices]
    head, *rows = split_rows(plan)
    marks = [COLOURS[split.backend % len(COLOURS)] for split in plan.splits]
    left_out = f"<p>and {len(rows) - MOST} more splits</p>" if len(rows) > MOST else ""
    sizes = [
        (name, bytes_text(size.weights_nbytes), bytes_text(size.copy_nbytes), bytes_text(size.temp_nbytes))
        for name, size in zip(names, plan.sizes, strict=True)
    ]
    of_backends = [COLOURS[b % len(COLOURS)] for b in range(len(names))]
    return (
        f"<div><p>{escape(plan_text(plan, 0))}</p>"
        f"{_table(head, rows[:MOST], marks)}{left_out}"
        f"{_table(('backend', 'weights', 'each copy', 'temporaries'), sizes, of_backends)}</div>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str]) -> str:
    """A table; each row has a mark of its colour."""
    titles = "".join(f'<th style="{_CELL}">{escape(title)}</th>' for title in head)
    body = []
    for row, colour in zip(rows, colours, strict=False):
        cells = "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row)
        body.append(f'<tr style="border-left:6px solid {colour}">{cells}</tr>')
    style = "border-collapse:collapse;margin:6px 0;font-size:90%"
    return f'<table style="{style}"><tr>{titles}</tr>{"".join(body)}</table>'
