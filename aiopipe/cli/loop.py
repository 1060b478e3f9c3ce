"""What people write today, for any plan: `device_put` and a jitted call for each part, with a few results in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from .._jax_compile import function_of
from ..backend import Backend
from ..devices.xla import XlaBackend
from ..live_weights import source_value
from ..sched.plan import Plan

__all__ = ["hand_written", "on_one_device", "windowed"]

Run = Callable[[], Any]


class _Part(NamedTuple):
    """A split of the loop: what to bring to its device, what to call, where the results go."""

    device: jax.Device
    moves: tuple[tuple[int, int], ...]
    fn: Callable[..., Sequence[Any]]
    operands: list[Any]
    gather: tuple[tuple[int, int], ...]
    outputs: tuple[int, ...]


def hand_written(plan: Plan, backends: Sequence[Backend], inputs: Sequence[Any]) -> Run | None:
    """The loop's body: one evaluation of the plan's parts, not waited for. None where a device is not JAX's.

    Args:
        plan: what runs where.
        backends: in the plan's order; they hold the weights.
        inputs: values of the graph's inputs.
    """
    if not all(isinstance(backends[split.backend], XlaBackend) for split in plan.splits):
        return None
    fns: dict[int, Callable[..., Sequence[Any]]] = {}
    parts = []
    for split, program, feed in zip(plan.splits, plan.programs, plan.launch_lists, strict=True):
        backend = backends[split.backend]
        assert isinstance(backend, XlaBackend)
        if id(program) not in fns:
            fns[id(program)] = jax.jit(function_of(program))
        operands: list[Any] = [None] * len(split.inputs)
        for position, t in feed.weights:
            operands[position] = jax.device_put(source_value(plan.graph.tensors[t], backend), backend.jax_device)
        fn = fns[id(program)]
        parts.append(_Part(backend.jax_device, feed.moves, fn, operands, feed.gather, feed.outputs))
    used = [inputs[i] for i in plan.used_inputs]
    n_slots = plan.n_slots
    results = [slot for kind, slot in plan.results if kind == "env"]

    def body() -> Any:
        slots: list[Any] = used + [None] * (n_slots - len(used))
        for device, moves, fn, template, gather, outputs in parts:
            for read, fill in moves:
                slots[fill] = jax.device_put(slots[read], device)
            operands = list(template)
            for position, slot in gather:
                operands[position] = slots[slot]
            for slot, value in zip(outputs, fn(*operands), strict=False):
                slots[slot] = value
        return [slots[slot] for slot in results]

    return body


def on_one_device(fn: Callable[..., Any], weights: Any, inputs: Sequence[Any], device: jax.Device) -> Run:
    """One call of the whole function, jitted on one device; not waited for."""
    jitted = jax.jit(fn)
    weights = jax.device_put(weights, device)

    def body() -> Any:
        return jitted(weights, *jax.device_put(tuple(inputs), device))

    return body


def windowed(body: Run, evaluations: int, window: int) -> Iterable[Any]:
    """So many evaluations, with `window` of them in flight; each result when it is ready."""
    ready: Any = jax.block_until_ready  # untyped in some versions of JAX
    pending: deque[Any] = deque()
    for _ in range(evaluations):
        pending.append(body())
        if len(pending) >= window:
            yield ready(pending.popleft())
    while pending:
        yield ready(pending.popleft())
