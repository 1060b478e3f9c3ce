"""Drawn JAX functions on CPU devices, with and without state; the oracle is `jax.jit` on one device.

Each example compiles several programs, so there are few; AIOPIPE_HYPOTHESIS=thorough has more (conftest.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopipe as ap
from jaxprograms import KINDS, STEPS, array_of, assert_like, run, tolerance

few = settings(max_examples=max(5, settings.default.max_examples // 4))  # type: ignore[union-attr]


def as_numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


async def cancelled(evaluation: ap.Evaluation) -> bool:
    try:
        await evaluation
    except asyncio.CancelledError:
        return True
    return False


@few
@given(
    inputs=st.lists(st.sampled_from(KINDS), min_size=1, max_size=2),
    weights=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), max_size=3),
    steps=st.lists(STEPS, min_size=1, max_size=7),
    outputs=st.lists(st.integers(0, 20), max_size=3),
    pins=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=3),
    n_devices=st.integers(1, 4),
    n_copies=st.integers(2, 4),
    drops=st.sets(st.integers(0, 5), max_size=3),
)
def test_a_drawn_function_equals_jit_whatever_is_placed_where(
    inputs: Any, weights: Any, steps: Any, outputs: Any, pins: Any, n_devices: int, n_copies: int, drops: set[int]
) -> None:
    params = [array_of(kind, seed=50 + i) for i, (kind, _) in enumerate(weights)]
    batches = [[array_of(kind, seed=10 * k + i) for i, kind in enumerate(inputs)] for k in range(6)]

    def model(w: Any, *xs: Any) -> Any:
        values = run(steps, [*xs, *w])
        picked = [values[o % len(values)] for o in outputs]
        return {"last": values[-1], "none": None, "picked": tuple(picked)}

    async def main(n_copies: int) -> list[Any]:
        async with ap.Scheduler([f"cpu:{i}" for i in range(n_devices)], n_copies=n_copies) as sched:
            places = {str(i): sched.backends[d % n_devices] for i, (_, d) in enumerate(weights)}
            graph = ap.trace(model, await ap.place(params, places) if params else [], *batches[0])
            for tensor, device in pins:
                made = [t for node in graph.nodes for t in node.outputs]
                if made:
                    pinned = graph.tensors[made[tensor % len(made)]]
                    sched.set_tensor_backend(graph, pinned, f"cpu:{device % n_devices}")
            running = []
            for k, batch in enumerate(batches):
                given = [x.copy() for x in batch]
                running.append(await sched.graph_compute_async(graph, *given))
                for x in given:
                    x[...] = 0
                if k in drops:
                    running[-1].cancel()
            results = [None if await cancelled(evaluation) else as_numpy(evaluation.result()) for evaluation in running]
            assert all(result is not None or k in drops for k, result in enumerate(results))
            return results

    want = [as_numpy(jax.jit(model)(params, *batch)) for batch in batches]
    exact: dict[int, list[bytes]] = {}
    for n in (1, n_copies):
        for k, got in enumerate(asyncio.run(main(n))):
            if got is not None:
                assert_like(got, want[k], tolerance(steps))
                assert exact.setdefault(k, bits(got)) == bits(got), "it depends on n_copies"


LEAVES = {"a": "float32[2,3]", "b": "float32[2,3]", "n": "int32[]", "e": "float32[0,3]"}
CHANGES = st.fixed_dictionaries(
    {
        "a": st.sampled_from(["keep", "swap", "overwrite", "write", "write twice"]),
        "b": st.sampled_from(["keep", "swap", "overwrite", "write", "write twice"]),
        "n": st.sampled_from(["keep", "count", "overwrite"]),
        "e": st.sampled_from(["keep", "overwrite"]),
    }
)
ACTS = st.tuples(
    st.sampled_from(["step"] * 6 + ["cancel", "snapshot", "fork", "reset", "restore"]),
    st.integers(0, 1),
    st.integers(0, 3),
)


@few
@given(
    changes=st.lists(CHANGES, min_size=1, max_size=2),
    steps=st.lists(STEPS, max_size=4),
    outputs=st.lists(st.integers(0, 20), max_size=2),
    places=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    n_devices=st.integers(1, 4),
    n_copies=st.integers(1, 4),
    acts=st.lists(ACTS, min_size=1, max_size=12),
)
def test_drawn_steps_of_states_equal_the_same_steps_one_after_the_other(
    changes: Any, steps: Any, outputs: Any, places: Any, n_devices: int, n_copies: int, acts: Any
) -> None:
    params = [array_of("float32[2,3]", seed=70 + i) for i in range(2)]

    def model_of(change: Any) -> Any:
        def model(w: Any, state: Any, x: Any) -> Any:
            values = run(steps, [x, *w], [state["a"], state["b"], state["n"], state["e"]])
            new = dict(state)
            for name, other, weight in (("a", "b", w[0]), ("b", "a", w[1])):
                written = state[name].at[0].set(x[1] + weight[0])
                new[name] = {
                    "keep": state[name],
                    "swap": state[other],
                    "overwrite": x + weight,
                    "write": written,
                    "write twice": (0.5 * written).at[:, 1].add(state[other][:, 0] * 0.25),
                }[change[name]]
            new["n"] = {"keep": state["n"], "count": state["n"] + 1, "overwrite": x[0, 0].astype(np.int32)}[change["n"]]
            new["e"] = x[:0] if change["e"] == "overwrite" else state["e"]
            return [values[-1], *(values[o % len(values)] for o in outputs)], new

        return model

    models = [model_of(change) for change in changes]
    oracles = [jax.jit(model) for model in models]
    begin = {name: array_of(kind, seed=90) for name, kind in LEAVES.items()}
    tol = 5 * tolerance(steps)

    async def main() -> None:
        async with ap.Scheduler([f"cpu:{i}" for i in range(n_devices)], n_copies=n_copies) as sched:
            where = {str(i): sched.backends[d % n_devices] for i, d in enumerate(places)}
            placed = await ap.place(params, where)
            x = array_of("float32[2,3]", seed=0)
            graphs = [ap.trace(model, placed, x, state=begin) for model in models]
            states = [ap.State(begin, name=f"s{i}") for i in range(2)]
            wanted: list[list[Any]] = [[begin], [begin]]  # what each may hold
            marked = [False, False]  # by a cancellation halfway, which may be or not
            taken: list[tuple[ap.Snapshot, list[Any]]] = []
            running: list[tuple[ap.Evaluation, list[Any]]] = []
            for k, (act, s, i) in enumerate(acts):
                s, x, which = s % 2, array_of("float32[2,3]", seed=k), i % len(models)
                try:
                    if act in ("step", "cancel"):
                        evaluation = await sched.graph_compute_async(graphs[which], x, state=states[s])
                        dropped = act == "cancel" and evaluation.cancel()
                        made = [as_numpy(oracles[which](params, w, x)) for w in wanted[s]]
                        if dropped:
                            marked[s] = True
                            wanted[s] = wanted[s] + [new for _, new in made]
                        else:
                            wanted[s] = [new for _, new in made]
                            running.append((evaluation, [out for out, _ in made]))
                    elif act == "snapshot":
                        taken.append((await states[s].snapshot(), wanted[s]))
                    elif act == "fork":
                        states[1 - s], wanted[1 - s], marked[1 - s] = await states[s].fork(), wanted[s], False
                    elif act == "reset":
                        await states[s].reset()
                        wanted[s], marked[s] = [begin], False
                    elif taken:
                        snapshot, value = taken[i % len(taken)]
                        await states[s].restore(snapshot)
                        wanted[s], marked[s] = value, False
                except ap.StateError:
                    assert marked[s]
                    await states[s].reset()
                    wanted[s], marked[s] = [begin], False
            for evaluation, outs in running:
                try:
                    like_one_of(as_numpy(await evaluation), outs, tol)
                except ap.StateError:
                    assert any(act == "cancel" for act, *_ in acts)
            for snapshot, values in taken:
                like_one_of(as_numpy(snapshot.value), values, tol)
            for state, values, may_be_marked in zip(states, wanted, marked, strict=True):
                if state.error is None:
                    like_one_of(as_numpy((await state.snapshot()).value), values, tol)
                else:
                    assert may_be_marked

    asyncio.run(main())


def like_one_of(got: Any, wanted: list[Any], tol: float) -> None:
    for want in wanted[:-1]:
        try:
            assert_like(got, want, tol)
        except AssertionError:
            continue
        return
    assert_like(got, wanted[-1], tol)
