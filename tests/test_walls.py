"""The walls between aiopipe's files: who may import whom, and how long a file gets.

Read from the sources, so an import inside a function or under TYPE_CHECKING counts like any other.
`docs/architecture.md` says what lives in each file.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "aiopipe"
FOLDER = Path(__file__).resolve().parent.parent / PACKAGE

# Lowest first. A file imports only from rows above its own. A package's own `__init__` goes by the package's name.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "devices", "sched", "_jax_settings"),
    ("_fork",),
    ("_loops",),
    ("_threads", "sync"),
    ("graph", "events", "comparison", "handle", "lanes", "batching", "spans"),
    ("graph_builder", "devices.base", "evaluation", "queue", "_jax_source", "_jax_types", "batch_tally", "notes"),
    ("progress_text", "timeline_draw", "timeline_file"),
    ("timeline_plot", "progress_table"),
    ("_jax_move", "_jax_nans", "executable"),
    ("_arguments", "buffer", "graph_plan", "_jax", "_jax_call"),
    ("_jaxpr", "_jax_compile", "_specs", "fetch", "tensor_range"),
    ("_jax_cost", "_jax_export", "_jax_lift", "sched.assign_check", "_jax_memory", "tensor_moves", "batch_request"),
    ("tensor_io",),
    ("trace", "backend", "streaming", "devices.clock", "devices.simops", "sched.decided", "sched.partition"),
    ("registry", "state"),
    ("lane_pool", "live_weights", "devices.remote_actor", "devices.xla", "devices.simvalue", "sched.assign"),
    ("devices.remote_link", "devices.simbackend", "sched.order"),
    ("devices.remote", "sched.split"),
    ("devices.ray", "sched.alloc", "sched.launch_lists", "sched.lower"),
    ("sched.plan_text",),
    ("sched.plan_dot", "sched.plan_html"),
    ("devices.sim", "sched.plan", "sched.stimuli"),
    ("sched.launch", "sched.state", "staging"),
    ("loaded", "placing"),
    ("loader",),
    ("completion", "mailbox"),
    ("run",),
    ("recorder",),
    ("observe", "timeline", "watcher"),
    ("statistics",),
    ("progress",),
    ("runner", "by_hand"),
    ("plans",),
    ("states", "closing", "counts"),
    ("ready",),
    ("sched.scheduler",),
    ("placement",),
    ("pipeline", "compare"),
    ("batcher",),
    ("",),
    ("cli.estimate", "cli.interrupt", "cli.progress", "cli.words"),
    ("cli.outcome",),
    ("cli.bench_report", "cli.devices", "cli.examples", "cli.loop", "cli.plan_report", "cli.quantities", "cli.target"),
    ("cli.devices_of", "cli.timeline", "cli.values"),
    ("cli.bench", "cli.plan"),
    ("cli.app",),
    ("cli",),
    ("__main__",),
)
ROW = {module: row for row, modules in enumerate(ROWS) for module in modules}

# Values in, values out: nothing here may know of loops, threads or queues.
CONCURRENCY = frozenset(
    "_thread anyio asyncio concurrent multiprocessing queue selectors signal socket subprocess threading".split()
)
TRACING = frozenset(
    "_arguments _jax _jax_call _jax_compile _jax_cost _jax_export _jax_lift _jax_memory _jax_move _jax_nans "
    "_jax_settings _jax_source _jax_types _jaxpr _specs trace".split()
)
PURE = TRACING | set(
    "errors graph graph_builder devices.base batching batch_tally notes progress_text spans timeline_draw "
    "timeline_file".split()
)
SCHEDULING = tuple(
    "sched by_hand closing completion counts lane_pool loaded loader observe placing plans ready recorder run runner "
    "staging states statistics streaming watcher".split()
)
IMPURE_SCHED = frozenset({"sched.scheduler"})

# What one thread leaves for another or waits with is made by the names in `_threads`, for `schedules.py` to stand in.
# Those of other machines wait for another process, whose order nobody here can choose; the command line has a timer to
# end its process.
SHARED = frozenset("Barrier Condition Event Lock RLock Semaphore SimpleQueue Thread Timer".split())
SHARED_IN = frozenset({"_threads", "cli.interrupt", "devices.ray", "devices.remote", "devices.remote_link"})

# Only these know JAX, and only `_jax` what differs between its versions.
JAX_PRIVATE = ("jax.extend", "jax._src", "jaxlib")
JAX_PRIVATE_IN = frozenset({"_jax", "_jax_move"})
JAX_IN = TRACING | {"devices.xla", "fetch", "placement", "pipeline", "state", "states", "batcher", "batch_request"}
JAX_IN |= {"cli.bench", "cli.devices", "cli.examples", "cli.loop", "cli.target", "cli.values"}

# `ml_dtypes` comes with JAX, which cannot do without it.
CORE_DEPENDENCIES = frozenset({"anyio", "jax", "jaxlib", "ml_dtypes", "numpy"})
EXTRAS = {
    "cli": frozenset({"rich", "typer"}),
    "devices.ray": frozenset({"ray"}),
    "progress_table": frozenset({"rich"}),
    "timeline_plot": frozenset({"matplotlib"}),
}
"""What a file, or all files of a package, may import besides."""

MAX_LINES = 400


def module_of(path: Path) -> str:
    """``sched.plan`` for aiopipe/sched/plan.py, ``sched`` for its package, ``""`` for aiopipe itself."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(FOLDER.rglob("*.py"))}


def imports_of(module: str, source: str, known: frozenset[str] = frozenset(FILES)) -> Iterator[tuple[int, str]]:
    """The line and the absolute dotted name of all that a file imports, names within packages included."""
    path = FILES.get(module)
    inside = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
    package = [PACKAGE, *filter(None, inside.split("."))]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                deeper = f"{origin}.{alias.name}"
                # "from . import graph" imports a file; "from .graph import Tensor" imports what is in one.
                is_file = deeper.removeprefix(f"{PACKAGE}.") in known
                yield node.lineno, deeper if is_file or not origin.startswith(PACKAGE) else origin
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jax":
            # "import jax" is enough to get at these.
            if f"jax.{node.attr}" in JAX_PRIVATE:
                yield node.lineno, f"jax.{node.attr}"


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def breaches(module: str, source: str) -> Iterator[str]:
    """Each import of a file that goes through a wall, and which wall."""
    pure = module in PURE or (within(module, "sched") and module not in IMPURE_SCHED)
    for line, name in imports_of(module, source):
        where = f"{PACKAGE}.{module}:{line} imports {name}: "
        top = name.partition(".")[0]
        if within(name, PACKAGE):
            target = name.removeprefix(PACKAGE).removeprefix(".")
            if target in ROW and ROW[target] >= ROW[module]:
                yield where + "it is not in a row above it (ROWS)"
            if within(module, "backend", "devices") and within(target, "sched"):
                yield where + "a backend knows nothing of scheduling"
            is_concrete = within(target, "devices") and target != "devices.base"
            if within(module, *SCHEDULING) and is_concrete:
                yield where + "the scheduler gets its backends as arguments"
            continue
        if pure and top in CONCURRENCY:
            yield where + "planning and run state know no loops and no threads"
        if within(name, *JAX_PRIVATE) and module not in JAX_PRIVATE_IN:
            yield where + "only aiopipe._jax touches what is private to JAX"
        elif top == "jax" and module not in JAX_IN:
            yield where + "this file works without JAX"
        extras = frozenset().union(*(found for owner, found in EXTRAS.items() if within(module, owner)))
        if top not in sys.stdlib_module_names and top not in CORE_DEPENDENCIES | extras:
            yield where + "that is no dependency of the core"


@pytest.mark.parametrize("module", FILES)
def test_file_keeps_to_its_place(module: str) -> None:
    assert module in ROW, f"{FILES[module].name} is new: give {module!r} a row in ROWS of tests/test_walls.py"
    source = FILES[module].read_text(encoding="utf-8")
    found = list(breaches(module, source))
    assert not found, "\n".join(found)
    n_lines = len(source.splitlines())
    assert n_lines <= MAX_LINES, f"{FILES[module]} has {n_lines} lines, more than {MAX_LINES}: split it by idea"


def shared_in(source: str) -> Iterator[str]:
    """What a file makes of `threading` and `queue` itself."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in SHARED:
            if node.value.id in ("threading", "queue"):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("threading", "queue"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name in SHARED)


@pytest.mark.parametrize("module", FILES)
def test_what_threads_share_has_one_place(module: str) -> None:
    assert module in SHARED_IN or not list(shared_in(FILES[module].read_text(encoding="utf-8")))


def test_what_threads_share_is_found() -> None:
    assert list(shared_in("import threading\ndef f(): return threading.Lock()")) == ["threading.Lock"]
    assert list(shared_in("from queue import Empty, SimpleQueue")) == ["queue.SimpleQueue"]
    assert not list(shared_in("import threading\nthreading.get_ident()"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("graph", "from .trace import trace"),
        ("graph", "from . import events"),
        ("graph", "def f():\n    import jax"),
        ("sched.assign", "from ..sched import split"),
        ("sched.plan", "from concurrent.futures import ThreadPoolExecutor"),
        ("sched.state", "import asyncio.events"),
        ("sched.scheduler", "from ..devices.xla import XlaBackend"),
        ("sched.scheduler", "from .. import pipeline"),
        ("devices.sim", "if TYPE_CHECKING:\n    from aiopipe.sched.plan import Plan"),
        ("backend", "import aiopipe.sched.state"),
        ("trace", "from jax.extend import core"),
        ("trace", "from jax import _src"),
        ("trace", "import jax\njax.extend.core.Primitive"),
        ("pipeline", "import jaxlib.xla_client"),
        ("pipeline", "import rich"),
        ("pipeline", "from .cli import estimate"),
        ("", "from .cli.estimate import estimate"),
    ],
)
def test_breach_is_found(module: str, source: str) -> None:
    assert list(breaches(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("trace", "import jax\nfrom jax import numpy\nfrom . import _jax\nfrom .graph import Graph"),
        ("sched.plan", "from ..graph import Graph\nfrom . import assign\nfrom .split import split_graph"),
        ("sched.scheduler", "import asyncio\nfrom ..devices.base import Device\nfrom ..backend import Backend"),
        ("_jax", "import jaxlib\nfrom jax._src import core"),
        ("cli.app", "import typer\nfrom .. import Pipeline"),
    ],
)
def test_lawful_import_passes(module: str, source: str) -> None:
    assert not list(breaches(module, source))
