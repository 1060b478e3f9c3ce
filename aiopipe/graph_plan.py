"""Graph plans: a whole graph as one program on one backend, computed by hand.

Without a scheduler there are no splits, no slots and no copies: a backend compiles the graph once
and its queue computes it, in order with everything else that is posted there.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from . import _threads
from ._jax_settings import undisturbed
from ._loops import running_loop
from .devices.base import Device, NodeFailure, Program
from .errors import (
    AiopipeError,
    EvaluationError,
    OutOfMemoryError,
    PlacementError,
    StateError,
    TensorError,
    said_by,
    says_no_room,
)
from .evaluation import Evaluation
from .events import Event
from .graph import Graph, Kind, Tensor
from .queue import Queue

__all__ = ["GraphPlan", "compute"]

_COPIED = (bool, int, float, complex, np.generic, np.ndarray)


class Compiled(Protocol):
    """What a backend makes of a program: `aiopipe.backend.Executable`."""

    @property
    def call(self) -> Callable[..., Sequence[Any]]: ...


class Owner(Protocol):
    """What a plan needs of its backend."""

    name: str
    device: Device
    queue: Queue
    newest: dict[int, Any]

    def launched(self, value: Any) -> None: ...

    def load(self, program: Program) -> Compiled: ...

    def upload(self, value: Any, tensor: Tensor) -> Any: ...

    def transfer(self, values: Sequence[Any]) -> Sequence[Any]: ...

    def host_buffer(self, tensor: Tensor) -> Any: ...

    def check_room(self, nbytes: int) -> None: ...

    def asking_for(self, tensor: Tensor) -> AbstractContextManager[None]: ...


class _Ready(NamedTuple):
    """A plan that can run: freeing the plan does not take it from work that is queued already."""

    call: Callable[..., Sequence[Any]] | None
    uploaded: dict[int, Any]


class GraphPlan:
    """A graph, compiled for one backend; made by `Backend.graph_plan_create`.

    Attributes:
        graph: what it computes.
        backend: where.
        program: all nodes as one function of the inputs, then the weights, that the nodes read; None for
            a graph without nodes.
    """

    def __init__(self, graph: Graph, backend: Any) -> None:
        owner: Owner = backend
        if graph.state:
            raise StateError(
                f"graph {graph.name!r} has a state ({graph.state[0].describe()}, …), which only a Scheduler keeps: "
                "give it to one, or trace the function with its state as an input"
            )
        for node in graph.nodes:
            if not owner.device.supports_op(node):
                made = ", ".join(graph.tensors[t].describe() for t in node.outputs) or "nothing"
                raise PlacementError(
                    f"{owner.name} does not support {node.name}, which makes {made} at "
                    f"{node.source or 'an unknown line'}: give the graph to a Scheduler with a backend that has it"
                )
        self.graph = graph
        self.backend = backend
        read = {t for node in graph.nodes for t in node.inputs}
        made_here = {t.id: t for t in graph.outputs if t.kind is Kind.NODE}
        self.program = (
            Program(
                name=f"{graph.name}_plan",
                nodes=graph.nodes,
                inputs=tuple(t for t in graph.leaves if t.id in read),
                outputs=tuple(made_here.values()),
                config=graph.config,
            )
            if graph.nodes
            else None
        )
        returned = {t.id for t in graph.outputs}
        self._weights = tuple(t for t in graph.weights if t.id in read or t.id in returned)
        self._ready: _Ready | None = None
        self._freed = False
        self._lock = _threads.Lock()

    @property
    def freed(self) -> bool:
        """Whether it has been freed, so that it cannot be computed any more."""
        return self._freed

    def check(self, backend: Any) -> None:
        """Raise `TensorError` after `free`, `PlacementError` on another backend than its own."""
        if self._freed:
            raise TensorError(
                f"the plan of graph {self.graph.name!r} on {self.backend.name} was freed: make another with "
                "graph_plan_create"
            )
        if self.backend is not backend:
            raise PlacementError(
                f"the plan of graph {self.graph.name!r} was made by {self.backend.name}, not by {backend.name}: "
                "compute it there, or make one here"
            )

    def load(self) -> _Ready:
        """Compile, and bring over the weights that the backend does not hold; once. Blocks."""
        with self._lock:
            if self._ready is None:
                owner: Owner = self.backend
                away = [t for t in self._weights if self._buffer(t) is None]
                if away:
                    owner.check_room(sum(t.nbytes for t in away))
                call = None if self.program is None else owner.load(self.program).call
                uploaded = {}
                for t in away:
                    with owner.asking_for(t):
                        uploaded[t.id] = owner.upload(_source_of(t), t)
                self._ready = _Ready(call, uploaded)
            return self._ready

    def free(self) -> None:
        """Let go of the executable and of weights that were brought over. What is queued still runs. Idempotent."""
        self._freed = True
        self._ready = None

    def _buffer(self, tensor: Tensor) -> Any:
        """The buffer that holds a weight on this backend, if there is one."""
        return next((buffer for buffer in tensor.buffers if buffer.backend is self.backend), None)

    def launch(self, ready: _Ready, inputs: Sequence[Any]) -> list[Any]:
        """On the backend's lane: values for `graph.outputs`, not yet ready.

        Args:
            ready: from `load`.
            inputs: for each of `graph.inputs` a captured value, or a tensor with a buffer, whose value
                counts as it is now, in the order of the queue.
        """
        owner: Owner = self.backend
        graph = self.graph
        env: dict[int, Any] = {}
        for tensor in self._weights:
            buffer = self._buffer(tensor)
            env[tensor.id] = ready.uploaded[tensor.id] if buffer is None else _value_of(tensor, buffer)
        away: list[int] = []
        for tensor, value in zip(graph.inputs, inputs, strict=True):
            if isinstance(value, Tensor):
                env[tensor.id] = _value_of(value, _buffer_on(value, self.backend))
            else:
                env[tensor.id] = value
                away.append(tensor.id)
        fed = () if self.program is None else self.program.inputs
        moving = [t.id for t in fed if t.id in set(away)]
        moved = dict(zip(moving, owner.transfer([env[t] for t in moving]), strict=True)) if moving else {}
        if ready.call is not None and self.program is not None:
            results = ready.call(*(moved.get(t.id, env[t.id]) for t in fed))
            owner.launched(results[-1])
            env.update((t.id, value) for t, value in zip(self.program.outputs, results, strict=False))
        for tensor in graph.inputs:  # one that is returned: the program may have been given it in another form
            if tensor.id in away and any(out.id == tensor.id for out in graph.outputs):
                env[tensor.id] = owner.upload(env[tensor.id], tensor)
        return [env[t.id] for t in graph.outputs]


def compute(
    plan: GraphPlan, inputs: Sequence[Any], number: int, *, outputs: Sequence[Tensor] | None = None
) -> Evaluation:
    """Queue one evaluation of a plan on its backend.

    Args:
        plan: compiled on the lane, if it has not been before.
        inputs: as the traced function takes them after the weights; or, with tensors among them, one value
            for each of `graph.inputs`. NumPy arrays are copied before this returns.
        number: `Evaluation.id`.
        outputs: tensors with buffers on the backend that take the results, one for each of `graph.outputs`.

    Raises:
        TensorError: an input or output does not fit, or an output has no buffer on the backend.
        BackendClosedError: the backend is closed.
    """
    graph, owner = plan.graph, plan.backend
    values = [_captured(owner, value, tensor) for value, tensor in zip(_flat(plan, inputs), graph.inputs, strict=True)]
    targets = _targets(plan, outputs)
    ready = plan._ready
    dropped = False
    results: list[Any] = []

    def job() -> Sequence[Any]:
        if dropped:
            return ()
        try:
            with undisturbed():
                results[:] = plan.launch(ready or plan.load(), values)
        finally:
            values.clear()
        for tensor, value in zip(targets, results, strict=bool(targets)):
            _buffer_on(tensor, owner).value = value
        return tuple(results or owner.newest.values())

    event = owner.queue.post(job, name=f"evaluation {number} of {graph.name!r}", reported=True)

    def cancel(_: int) -> bool:
        nonlocal dropped
        dropped = True
        if (alive := this()) is not None:
            alive._settle(cancelled=True)
        return True

    def settle(_: Event) -> None:
        if evaluation.done():  # cancelled
            return
        error = event.exception()
        if error is None:
            try:
                result = graph.unflatten_outputs(results)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as raised:  # the user's own pytree node may raise
                evaluation._settle(error=raised)
            else:
                evaluation._settle(result=result)
        elif isinstance(error, AiopipeError):
            evaluation._settle(error=error)
        elif isinstance(error, asyncio.CancelledError):  # of something that the queue waited for
            evaluation._settle(cancelled=True)
        else:
            evaluation._settle(error=_failure(plan, number, error))

    evaluation = Evaluation(number, graph.name, running_loop(), cancel, lambda _: [event], 1)
    this = weakref.ref(evaluation)  # else it would refer to itself, and keep its result until the next collection
    evaluation.copy_id = 0
    event.add_callback(settle)
    return evaluation


def _failure(plan: GraphPlan, number: int, cause: BaseException) -> EvaluationError:
    nodes = plan.graph.nodes
    known = cause.position if isinstance(cause, NodeFailure) else None
    name, source = (nodes[known or 0].name, nodes[known or 0].source) if nodes else ("", "")
    said = (
        f"evaluation {number} of {plan.graph.name!r} failed on {plan.backend.name!r}, in "
        f"{'the graph that begins with ' if known is None else ''}{name or 'no node'} at "
        f"{source or 'an unknown line'}: {said_by(cause)}"
    )
    error = EvaluationError(said, split=0, backend=plan.backend.name, node=name, source=source)
    if says_no_room(cause):
        held = () if plan.program is None else (*plan.program.inputs, *plan.program.outputs)
        nbytes = sum(t.nbytes for t in held)
        error = OutOfMemoryError(
            f"{said}\n{plan.backend.name!r} has no memory left. The graph takes and returns {nbytes} bytes: compute on "
            "smaller inputs, or free what else is there",
            split=0,
            backend=plan.backend.name,
            node=name,
            source=source,
            asked_nbytes=nbytes,
            available_nbytes=plan.backend.device.props.memory_nbytes or 0,
        )
    error.__cause__ = cause.with_traceback(None)
    return error


def _flat(plan: GraphPlan, inputs: Sequence[Any]) -> Sequence[Any]:
    """A value or tensor for each of the graph's inputs, checked."""
    graph = plan.graph
    if not any(isinstance(value, Tensor) for value in inputs):
        return graph.flatten_inputs(tuple(inputs))
    if len(inputs) != len(graph.inputs):
        raise TensorError(
            f"graph {graph.name!r} got {len(inputs)} values, expected {len(graph.inputs)}: with tensors among them, "
            "give one for each of graph.inputs"
        )
    for value, tensor in zip(inputs, graph.inputs, strict=True):
        if isinstance(value, Tensor):
            _check_fits(value, tensor, f"input {tensor.describe()} of graph {graph.name!r}")
            _buffer_on(value, plan.backend)
        elif tuple(np.shape(value)) != tensor.shape or str(getattr(value, "dtype", tensor.dtype)) != tensor.dtype:
            got = f"{getattr(value, 'dtype', type(value).__name__)}{list(np.shape(value))}"
            raise TensorError(f"input {tensor.describe()} of graph {graph.name!r} got {got}: give a value of its type")
    return inputs


def _targets(plan: GraphPlan, outputs: Sequence[Tensor] | None) -> Sequence[Tensor]:
    graph = plan.graph
    if outputs is None:
        return ()
    if len(outputs) != len(graph.outputs):
        raise TensorError(f"graph {graph.name!r} got {len(outputs)} output tensors, expected {len(graph.outputs)}")
    for target, tensor in zip(outputs, graph.outputs, strict=True):
        _check_fits(target, tensor, f"output {tensor.describe()} of graph {graph.name!r}")
        _buffer_on(target, plan.backend)
    return tuple(outputs)


def _check_fits(got: Tensor, expected: Tensor, what: str) -> None:
    if (got.shape, got.dtype) != (expected.shape, expected.dtype):
        raise TensorError(f"{what} got the tensor {got.describe()}: give one of its shape and element type")


def _buffer_on(tensor: Tensor, backend: Any) -> Any:
    for buffer in tensor.buffers:
        if buffer.backend is backend:
            return buffer
    have = ", ".join(buffer.backend.name for buffer in tensor.buffers) or "none"
    raise TensorError(
        f"tensor {tensor.describe()} has no buffer on {backend.name} (where it has one: {have}): "
        "allocate it there, and copy it with tensor_copy"
    )


def _value_of(tensor: Tensor, buffer: Any) -> Any:
    if buffer.value is None:
        raise TensorError(f"tensor {tensor.describe()} on {buffer.backend.name} has no value: tensor_set it first")
    if not buffer.backend.supports_buffer_type(buffer.buffer_type):  # in a memory that it does not compute in
        return buffer.backend.transfer([buffer.value])[0]
    return buffer.value


def _source_of(tensor: Tensor) -> Any:
    """The value of a weight that is somewhere else, or nowhere yet."""
    if tensor.buffers:
        return _value_of(tensor, tensor.buffers[0])
    return tensor.given()


def _captured(owner: Owner, value: Any, tensor: Tensor) -> Any:
    """What the caller may change is copied now; immutable arrays and tensors are taken as they are."""
    if not isinstance(value, _COPIED):
        return value
    buffer = owner.host_buffer(tensor)
    if buffer is None:
        return np.array(value)
    np.copyto(buffer, value, casting="same_kind")
    return buffer
