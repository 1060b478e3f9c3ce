"""Notebooks: `await` at the top level, plans and timelines that show themselves; on the loopback interface alone."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from aiopipe.sched.plan import make_plan
from aiopipe.sched.plan_html import MOST
from graphs import gpus
from simgraphs import chain

CELLS = (
    """
import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_num_cpu_devices", 2)

import aiopipe as ap


def model(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x


pipe = ap.Pipeline(model, [np.eye(8, dtype=np.float32)] * 4, devices=["cpu:0", "cpu:1"], split=[1, 1], timeline=True)
await pipe.__aenter__()
""",
    """
x = np.ones((2, 8), np.float32)
async with ap.Progress(pipe) as progress:
    progress.begin("computing", total=5)
    async for y in pipe.stream([x] * 5):
        progress.advance()
np.asarray(y).shape
""",
    "await pipe.plan(x)",
    "await pipe.aclose()\npipe.timeline",
)


class Checked(HTMLParser):
    """HTML whose elements end in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        for name, value in attrs:
            assert name not in ("src", "href") and "url(" not in (value or ""), (name, value)  # it asks nobody

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.mark.timeout(120)
def test_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    _, computed, plan, timeline = (cell.outputs for cell in notebook.cells)
    assert any("computing: 5 of 5" in output.get("text", "") for output in computed)
    assert computed[-1]["data"]["text/plain"] == "(2, 8)"
    shown = Checked(plan[-1]["data"]["text/html"])
    assert {"table", "td"} <= shown.tags and "cpu:1" in shown.words and "2 splits" in shown.words
    shown = Checked(timeline[-1]["data"]["text/html"])
    assert {"svg", "rect"} <= shown.tags and "busy" in shown.words


def test_a_plan_shows_its_splits_and_escapes_every_name() -> None:
    plan = make_plan(chain(2, name="<script>alert(1)</script>"), gpus(2))
    shown = Checked(plan._repr_html_())
    assert "script" not in shown.tags and "<script>" in shown.words and "#0" in shown.words


def test_a_plan_of_many_splits_shows_the_first_of_them() -> None:
    graph = chain(MOST + 30)
    pins = {node.outputs[0]: i % 2 for i, node in enumerate(graph.nodes)}
    shown = Checked(make_plan(graph, gpus(2), pins=pins)._repr_html_())
    assert f"#{MOST - 1}" in shown.words and f"#{MOST}" not in shown.words and "and 30 more splits" in shown.words
