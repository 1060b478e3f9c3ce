"""Plans as text and as a drawing: what is printed is what was planned. No JAX, no loop."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest

from aiopipe.errors import TensorError
from aiopipe.graph import Graph, Kind
from aiopipe.sched.plan import Plan, make_plan
from aiopipe.sched.plan_text import bytes_text
from aiopipe.sched.split import HOST
from graphs import Draft, chain, gpus, random_graph


def on(graph: Graph, *backends: int) -> dict[int, tuple[int, ...]]:
    """Weights on these backends, in order."""
    return {t.id: (b,) for t, b in zip(graph.weights, backends, strict=True)}


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    graph = random_graph(rng, rng.randrange(1, 60))
    devices = gpus(rng.randrange(1, 4))
    pins = {n.outputs[0]: rng.randrange(len(devices)) for n in graph.nodes if rng.random() < 0.5 and n.outputs}
    held = {t.id: (rng.randrange(len(devices)),) for t in graph.weights}
    return make_plan(graph, devices, pins=pins, weights=held)


# Text ---------------------------------------------------------------------------------------------


def test_a_graph_that_computes_nothing() -> None:
    b = Draft("nothing")
    x = b.x()
    plan = make_plan(b.build([x]), gpus(1))
    assert plan.text(0).startswith("plan of 'nothing': 0 nodes, 0 splits")
    assert all(line in plan.text(2).splitlines() for line in plan.text(1).splitlines())
    assert plan.dot().startswith("digraph")


def test_the_least_detail_is_one_line() -> None:
    graph = chain(3)
    plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1, 0))
    assert plan.text(0) == (
        "plan of 'chain': 6 nodes, 3 splits (2 on gpu:0, 1 on gpu:1); "
        "each evaluation moves 16 B between backends and 8 B from the host"
    )


def test_printing_shows_the_table() -> None:
    plan = make_plan(chain(2), gpus(2))
    assert str(plan) == plan.text() == plan.text(1)
    assert plan.text(2).startswith(plan.text(1) + "\n")


def test_full_detail_of_one_plan() -> None:
    graph = chain(2, weight=1500)
    plan = make_plan(graph, gpus(2), weights=on(graph, 0, 1))
    assert plan.text(2).removeprefix(plan.text(1)).split("\n")[2:] == [
        "leaf             kind    backends  cause  size",
        "'x' int8[8]      input   cpu:0     1.inp  8 B",
        "'w0' int8[1500]  weight  gpu:0     1.wgt  1.5 KB",
        "'w1' int8[1500]  weight  gpu:1     1.wgt  1.5 KB",
        "",
        "split #0 on gpu:0",
        "  copy  'x' int8[8]    gpu:0  from the host  8 B",
        "  node  dot_general#0  gpu:0  1.wgt1         int8[8]  model.py:0 (f)",
        "  node  relu#1         gpu:0  2.2            int8[8]  model.py:1 (f)",
        "",
        "split #1 on gpu:1, after #0",
        "  copy  'relu#1' int8[8]  gpu:1  from gpu:0  8 B",
        "  node  dot_general#2     gpu:1  1.wgt1      int8[8]  model.py:2 (f)",
        "  node  relu#3            gpu:1  2.2         int8[8]  model.py:3 (f)",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_full_detail_lists_every_node_and_copy(seed: int) -> None:
    plan = random_plan(seed)
    graph, blocks = plan.graph, plan.text(2).split("\n\n")
    by_split = {m[1]: block.splitlines()[1:] for block in blocks if (m := re.match(r"split #(\d+) on ", block))}
    assert by_split.keys() == {str(split.index) for split in plan.splits}
    listed: set[str] = set()
    for split in plan.splits:
        lines, name = by_split[str(split.index)], plan.devices[split.backend].name
        assert len(lines) == len(split.copies) + len(split.nodes)
        for line, copy in zip(lines, split.copies, strict=False):
            src = "the host" if copy.src == HOST else plan.devices[copy.src].name
            assert line.split()[0] == "copy" and graph.tensors[copy.tensor].describe() in line
            assert f" {name} " in line and f"from {src} " in line and line.endswith(bytes_text(copy.nbytes))
        for line, i in zip(lines[len(split.copies) :], split.nodes, strict=True):
            cause = "recomputed" if i in split.recomputed else plan.assignment.node_cause[i]
            assert line.split()[:4] == ["node", graph.nodes[i].name, name, cause]
            assert line.endswith(graph.nodes[i].source)
            listed.add(graph.nodes[i].name)
    dropped = [block.splitlines()[1:] for block in blocks if block.startswith("nodes that nothing needs")]
    listed |= {line.split()[1] for lines in dropped for line in lines}
    assert listed == {node.name for node in graph.nodes}
    for leaf in graph.leaves:
        assert f"\n{leaf.describe()} " in plan.text(2)


def test_a_weight_that_is_read_elsewhere_is_shown_as_copied() -> None:
    b = Draft()
    x, w = b.x(), b.w()
    graph = b.build([b.op("dot_general", x, w)])
    plan = make_plan(graph, gpus(2), weights={w: (0,)}, pins={graph.outputs[0].id: 1})
    assert "gpu:0, copied to gpu:1" in plan.text(2)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(TensorError, match="expected 0, 1 or 2"):
        make_plan(chain(1), gpus(1)).text(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (123_456, "123 KB"), (2.5e6, "2.5 MB"), (7.5e12, "7500 GB")],
)
def test_sizes_are_readable(nbytes: float, text: str) -> None:
    assert bytes_text(nbytes) == text


# Graphviz -----------------------------------------------------------------------------------------

STRING = r'"(?:[^"\\\n]|\\.)*"'
ID = rf"(?:{STRING}|[A-Za-z_]\w*)"
ATTRIBUTES = rf"\[{ID}={ID}(?:, {ID}={ID})*\]"
STATEMENTS = {
    "open": rf"digraph (?P<name>{ID}) \{{",
    "cluster": rf"subgraph (?P<name>{ID}) \{{",
    "close": r"\}",
    "set": rf"(?P<key>{ID})=(?P<value>{ID});",
    "edge": rf"(?P<src>{ID}) -> (?P<dst>{ID}) (?P<attributes>{ATTRIBUTES});",
    "node": rf"(?P<id>{ID}) (?P<attributes>{ATTRIBUTES});",
}


class Drawing(NamedTuple):
    """What a DOT text says: node -> cluster (or None), and (from, to, label, style)."""

    clusters: dict[str, str]
    nodes: dict[str, str | None]
    edges: list[tuple[str, str, str, str]]


def attributes_of(text: str) -> dict[str, str]:
    return {key: value.strip('"') for key, value in re.findall(rf"({ID})=({ID})", text)}


def parse(dot: str) -> Drawing:
    """The part of DOT's grammar that plans use; anything else fails."""
    drawing, inside = Drawing({}, {}, []), []
    for number, line in enumerate(dot.splitlines()):
        matches = {kind: m for kind, pattern in STATEMENTS.items() if (m := re.fullmatch(pattern, line.strip()))}
        assert len(matches) == 1, f"not DOT: {line}"
        ((kind, match),) = matches.items()
        assert (kind == "open") == (number == 0)
        assert number == 0 or inside, "a statement after the end"
        if kind in ("open", "cluster"):
            inside.append(match["name"].strip('"'))
        elif kind == "close":
            inside.pop()
        elif kind == "set" and match["key"] == "label":
            drawing.clusters[inside[-1]] = match["value"].strip('"').split("\\n")[0]
        elif kind == "node" and match["id"] not in ("node", "edge", "graph"):
            assert match["id"] not in drawing.nodes, "a node is declared once"
            drawing.nodes[match["id"]] = inside[-1] if len(inside) > 1 else None
        elif kind == "edge":
            about = attributes_of(match["attributes"])
            drawing.edges.append((match["src"], match["dst"], about["label"], about.get("style", "solid")))
    assert not inside, "a brace is open"
    return drawing


@pytest.mark.parametrize("seed", range(60))
def test_the_drawing_is_the_plan(seed: int) -> None:
    plan = random_plan(seed)
    tensors, drawing = plan.graph.tensors, parse(plan.dot())
    for split in plan.splits:
        assert drawing.clusters[str(drawing.nodes[f"split_{split.index}"])] == plan.devices[split.backend].name
    assert len(drawing.nodes) - plan.n_splits == len(drawing.nodes.keys() & {"inputs", "outputs"})
    ends = {end for src, dst, _, _ in drawing.edges for end in (src, dst)}
    assert ends <= drawing.nodes.keys(), "an edge leads to nothing"
    # What is copied, and how much, is what the plan copies.
    wanted: dict[tuple[str, str], int] = {}
    for split in plan.splits:
        for copy in split.copies:
            src = "inputs"
            if copy.src != HOST:
                makers = [s for s in plan.splits if s.backend == copy.src and copy.tensor in s.outputs]
                src = f"split_{makers[0].index}"
            key = (src, f"split_{split.index}")
            wanted[key] = wanted.get(key, 0) + tensors[copy.tensor].nbytes
    solid = {(src, dst): label.split("\\n")[0] for src, dst, label, style in drawing.edges if style == "solid"}
    assert solid == {key: bytes_text(n) for key, n in wanted.items()}
    # Every dependency has an edge, and no edge goes backwards.
    drawn = {(src, dst) for src, dst, _, _ in drawing.edges}
    for split in plan.splits:
        for before in split.depends:
            assert (f"split_{before}", f"split_{split.index}") in drawn
        for src, dst in drawn:
            if dst == f"split_{split.index}" and src != "inputs":
                assert int(src.removeprefix("split_")) in split.depends
    returned = {t.id for t in plan.graph.outputs if t.kind is not Kind.WEIGHT}
    assert bool(returned) == ("outputs" in drawing.nodes)


def test_names_with_quotes_and_backslashes_are_escaped() -> None:
    b = Draft('a "b" \\ c')
    x = b.x('p["q"]\\')
    graph = b.build([b.op("relu", x, source='C:\\model.py:1 ("f")')])
    dot = make_plan(graph, gpus(1)).dot()
    assert parse(dot).nodes.keys() == {"split_0", "inputs", "outputs"}
    assert 'digraph "a \\"b\\" \\\\ c" {' in dot


def test_many_values_on_one_edge_are_counted() -> None:
    b = Draft()
    x = b.x()
    parts = b.ops("split", x, b.w(), nbytes=(8,) * 5)
    graph = b.build([b.op("concatenate", *parts, b.w("v"))])
    drawing = parse(make_plan(graph, gpus(2), weights=on(graph, 0, 1)).dot())
    (label,) = [label for src, dst, label, _ in drawing.edges if (src, dst) == ("split_0", "split_1")]
    assert label == "40 B\\nsplit#0.0, split#0.1, split#0.2 and 2 more"


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it() -> None:
    done = subprocess.run(["dot", "-Tsvg"], input=random_plan(3).dot(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<svg" in done.stdout


def test_printing_changes_nothing() -> None:
    plan: Any = random_plan(5)
    assert (plan.text(2), plan.dot()) == (plan.text(2), plan.dot())
