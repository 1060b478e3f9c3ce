"""Two backends, node by node: how one finds the op that a new device gets wrong. And a graph's copy.

After `ggml_backend_compare_graph_backend` and `ggml_backend_graph_copy` of ggml-backend.cpp. There,
each backend goes on with its own results; here both compute every node from the first one's, so that
an early difference does not spread over all that follow.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any

from ._threads import in_thread
from .backend import Backend, Executable
from .comparison import Comparison, NodeDifference, array_difference
from .devices.base import Program
from .errors import AiopipeError, EvaluationError, PlacementError, TensorError
from .graph import Graph, Node, Tensor
from .live_weights import source_value
from .placement import upload_weight
from .sched.lower import lower
from .sched.split import Split
from .state import State, check_state

__all__ = ["compare_backends", "graph_copy"]

Callback = Callable[[int, Node, Any, Any, float], bool | Awaitable[bool]]


async def compare_backends(
    graph: Graph, a: Backend, b: Backend, callback: Callback | None = None, *, inputs: Sequence[Any], state: Any = None
) -> Comparison:
    """Run a graph node by node on two backends, both from the results of `a`, and compare.

    Every node is compiled by itself, as slow as that is; equal nodes share a compilation. A node
    with an effect has it on both.

    Args:
        graph: what to run; not changed. Its weights may be anywhere.
        a: the backend to trust; it must have every op.
        b: the backend in question. Ops that it says it lacks are reported, not run.
        callback: called with (index, node, value of a, value of b, largest absolute difference)
            after each node, in order; plain or async; False stops the comparison. Values are NumPy
            arrays, or tuples of them for a node with several results.
        inputs: the graph's arguments, as in ``graph_compute(graph, *inputs)``.
        state: for a graph that was traced with one, a pytree of arrays to begin with, e.g. a snapshot's value.
            It is not changed.

    Returns:
        The differences of all nodes up to the one where the callback stopped.

    Raises:
        TensorError: the inputs do not fit, or a weight has no value.
        StateError: the state does not fit.
        PlacementError: `a` lacks an op.
        EvaluationError: a node failed on one of the backends (`split` is the node's index).
        BackendClosedError: a backend is closed.
    """
    if not isinstance(inputs, tuple | list):
        raise TensorError(
            f"inputs of {graph.name!r} are a {type(inputs).__name__}: expected a tuple with an entry "
            "for each argument, as in inputs=(x,)"
        )
    a.check_open()
    b.check_open()
    _check_ops(graph, a)
    values = {t.id: value for t, value in zip(graph.inputs, graph.flatten_inputs(tuple(inputs)), strict=True)}
    begin = State(state) if graph.state else None
    check_state(graph, begin)
    if begin is not None:
        values.update(zip((t.id for t in graph.state), begin.begin_values(), strict=True))
    return await _compare(graph, _Side(a), _Side(b), callback, values)


async def graph_copy(graph: Graph, backend: Backend) -> Graph:
    """A copy of a graph whose weights are on a backend: the nodes beside them then run there.

    Args:
        graph: what to copy; not changed. Its inputs, nodes and names are those of the copy.
        backend: who gets the weights. What it holds already is not copied; an array that is
            several of the weights is copied once.

    Raises:
        TensorError: a weight has no value.
        AllocationError: the backend has no room.
        BackendClosedError: the backend is closed.
    """
    backend.check_open()

    def upload() -> Mapping[int, tuple[Any, ...]]:
        copied: dict[int, tuple[Any, ...]] = {}
        buffers: dict[int, tuple[Any, ...]] = {}
        for tensor in graph.weights:
            value = source_value(tensor, backend)
            if id(value) not in copied:
                leaf = tensor if tensor.buffers else value
                copied[id(value)] = upload_weight(tensor.name, leaf, [backend]).buffers
            buffers[tensor.id] = copied[id(value)]
        return buffers

    return graph.with_buffers(await in_thread(upload, "upload"))


def _check_ops(graph: Graph, a: Backend) -> None:
    for node in graph.nodes:
        if not a.device.supports_op(node):
            raise PlacementError(
                f"{a.name!r} has no {node.op!r} ({node.name} of graph {graph.name!r}, "
                f"{node.source or 'no source line'}): the first backend must run every node; try them the other way"
            )


async def _compare(graph: Graph, a: _Side, b: _Side, callback: Callback | None, inputs: dict[int, Any]) -> Comparison:
    last_use = {t: node.index for node in graph.nodes for t in node.inputs}
    here: dict[int, Any] = {}  # handles of a
    there: dict[int, Any] = {}  # handles of b, of the same values
    found: list[NodeDifference] = []
    stopped = False
    for node, program in zip(graph.nodes, _programs(graph), strict=True):
        supported = b.backend.device.supports_op(node)
        operands = [graph.tensors[t] for t in dict.fromkeys(node.inputs)]  # equal nodes may share their program

        def fetch(operands: Sequence[Tensor] = operands, supported: bool = supported) -> None:
            for tensor in operands:
                if tensor.id not in here:
                    given = tensor.id in inputs
                    value = inputs[tensor.id] if given else source_value(tensor, a.backend)
                    here[tensor.id] = a.backend.upload(value, tensor)
                if supported and tensor.id not in there:
                    there[tensor.id] = b.backend.upload(here[tensor.id], tensor)

        await in_thread(fetch, "upload")
        made = await a.run(node, program, [here[t.id] for t in operands])
        here.update((t, value) for t, value in zip(node.outputs, made, strict=False) if t in last_use)
        if supported:
            other = await b.run(node, program, [there[t.id] for t in operands])
            difference, x, y = await _difference(node, (a.backend, made), (b.backend, other))
            found.append(difference)
            if callback is not None and not await _goes_on(callback, difference, node, x, y):
                stopped = True
                break
        else:
            found.append(NodeDifference(node.index, node.name, node.op, node.source, supported=False))
        for t in node.inputs:
            if last_use[t] == node.index:
                here.pop(t, None)
                there.pop(t, None)
    return Comparison(graph.name, a.backend.name, b.backend.name, tuple(found), len(graph.nodes), stopped)


async def _goes_on(callback: Callback, difference: NodeDifference, node: Node, x: Any, y: Any) -> bool:
    answer = callback(node.index, node, x, y, difference.max_abs_difference)
    if inspect.isawaitable(answer):
        answer = await answer
    return answer is None or bool(answer)  # a callback that only prints returns nothing


def _programs(graph: Graph) -> Sequence[Program]:
    """A program for each node."""
    splits = [
        Split(node.index, 0, (node.index,), tuple(dict.fromkeys(node.inputs)), node.outputs, (), (), ())
        for node in graph.nodes
    ]
    return lower(graph, splits, [()] * len(splits))


class _Side:
    """One backend, and what has been compiled for it. Launches go through its own queue."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._executables: dict[Hashable, Executable] = {}

    async def run(self, node: Node, program: Program, operands: Sequence[Any]) -> Sequence[Any]:
        """Launch a node and wait for its results, as handles."""
        backend = self.backend
        made: list[Any] = []

        def launch() -> Sequence[Any]:
            made.extend(executable.call(*operands))
            backend.launched(made[0])
            return made

        try:
            if program.key in self._executables:
                executable = self._executables[program.key]
            else:
                executable = await in_thread(lambda: backend.load(program), "compile")
                self._executables[program.key] = executable
            await backend.queue.post(launch, name=node.name, reported=True)
        except AiopipeError:
            raise
        except Exception as error:
            raise EvaluationError(
                f"{node.name} failed on {backend.name!r} ({node.source or 'no source line'}): {error}",
                split=node.index,
                backend=backend.name,
                node=node.name,
                source=node.source,
            ) from error
        return made


async def _difference(node: Node, *results: tuple[Backend, Sequence[Any]]) -> tuple[NodeDifference, Any, Any]:
    """What differs, and both backends' values as NumPy arrays."""

    def compute() -> tuple[NodeDifference, Any, Any]:
        x, y = (
            [backend.download(value) for _, value in zip(node.outputs, made, strict=False)] for backend, made in results
        )
        largest, scale, n_nan = 0.0, 0.0, 0
        for one, other in zip(x, y, strict=True):
            difference, value, nans = array_difference(one, other)
            largest, scale, n_nan = max(largest, difference), max(scale, value), n_nan + nans
        found = NodeDifference(node.index, node.name, node.op, node.source, largest, scale, n_nan)
        return found, _single(x), _single(y)

    return await in_thread(compute, "compare")


def _single(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
