"""What is read from files or from other machines is never run as code: nothing unpickles, evaluates or executes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for folder in ("aiopipe", "examples", "scripts") for path in (ROOT / folder).rglob("*.py"))

MODULES = frozenset("pickle cPickle _pickle cloudpickle dill joblib marshal shelve jsonpickle yaml torch".split())
"""Whatever reads code along with data."""

AMONG_MACHINES = "aiopipe/devices/remote_actor.py"
"""Pickles errors for the way between processes of one Ray cluster, which trust each other: Ray pickles all it sends."""

BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})


def runs_data(source: str) -> Iterator[str]:
    """Each place where a program could run what it has read."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if not node.level else []
        else:
            names = []
        yield from (f"{node.lineno}: imports {name}" for name in names if name.partition(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
            yield f"{node.lineno}: calls {node.func.id}"
        for keyword in node.keywords:
            value = keyword.value
            off = isinstance(value, ast.Constant) and value.value is False
            if keyword.arg in ("allow_pickle", "shell", "trust_remote_code") and not off:
                yield f"{node.lineno}: passes {keyword.arg}"


def test_the_files_are_found() -> None:
    assert {"aiopipe/loader.py", "examples/llama/gguf_file.py", "examples/minilm/files.py"} <= {
        path.relative_to(ROOT).as_posix() for path in FILES
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_that_is_read_is_run(path: Path) -> None:
    found = [place.partition(": ")[2] for place in runs_data(path.read_text(encoding="utf-8"))]
    assert found == (["imports pickle"] if path == ROOT / AMONG_MACHINES else [])


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal as m",
        "import numpy as np\nnp.load(p, allow_pickle=True)",
        "np.load(p, allow_pickle=flag)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_what_would_run_it_is_found(source: str) -> None:
    assert list(runs_data(source))


@pytest.mark.parametrize("source", ["np.load(p)", "np.load(p, allow_pickle=False)", "re.compile(p)"])
def test_what_is_harmless_passes(source: str) -> None:
    assert not list(runs_data(source))
