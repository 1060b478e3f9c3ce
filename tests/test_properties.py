"""Drawn JAX functions on CPU devices, with and without state; the oracle is `jax.jit` on one device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopipe as ap
from aiopipe.backend import Dispatch
from executables import compiled_once, jit
from jaxprograms import KINDS, STEPS, Step, array_of, as_numpy, assert_like, is_key, run, tolerance
from jaxworld import SPECS, Real, function_of
from plays import ACTS, Play
from simgraphs import settled

N_EXAMPLES: int = settings.default.max_examples  # type: ignore[union-attr]


@pytest.fixture(scope="module", autouse=True)
def _compiled_once() -> Iterator[None]:
    with compiled_once():
        yield


def bits(tree: Any) -> list[bytes]:
    return [leaf.tobytes() for leaf in jax.tree.leaves(tree)]


async def cancelled(evaluation: ap.Evaluation) -> bool:
    try:
        await evaluation
    except asyncio.CancelledError:
        return True
    return False


# Functions of inputs -----------------------------------------------------------------------------


class Function(NamedTuple):
    """A drawn function: kinds of its inputs and weights, what it does, what it returns, counted round."""

    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    nested: bool

    def __call__(self, params: Any, *args: Any, order: Sequence[int] = ()) -> Any:
        xs = args[0]["xs"] if self.nested else args
        values = run(self.steps, [*xs, *params["w"]], order=order)
        picked = [values[o % len(values)] for o in self.outputs]
        return {"last": values[-1], "none": None, "picked": tuple(picked)}

    def batch(self, k: int) -> list[Any]:
        """The k-th values of its inputs."""
        return [array_of(kind, seed=10 * k + i) for i, kind in enumerate(self.inputs)]

    def args(self, batch: list[Any]) -> list[Any]:
        return [{"none": None, "xs": batch}] if self.nested else batch


class Places(NamedTuple):
    """Where things are, counted round: devices, weights, inputs; values that are pinned, or nodes that are cut."""

    n_devices: int
    dispatch: Dispatch
    op_offload: bool
    weights: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]
    pins: tuple[tuple[int, int], ...]
    cut: tuple[int, ...]
    order: tuple[int, ...]

    async def params(self, function: Function, sched: ap.Scheduler) -> Any:
        """The function's weights, each as it was drawn: placed, on several devices, JAX's, or NumPy's."""
        weights: list[Any] = []
        for i, kind in enumerate(function.weights):
            how, device = self.weights[i % len(self.weights)]
            value, backend = array_of(kind, seed=50 + i), sched.backends[device % self.n_devices]
            if how == "placed":
                value = await ap.place(value, lambda _, backend=backend: backend)
            elif how == "everywhere":
                value = await ap.place(value, lambda _: sched.backends)
            elif how == "array":
                value = jax.device_put(value, jax.devices()[device % self.n_devices])
            weights.append(value)
        return {"w": weights, "none": None}

    def decide(self, sched: ap.Scheduler, graph: ap.Graph) -> None:
        """Pin and cut."""
        made = [t for node in graph.nodes for t in node.outputs]
        for tensor, device in self.pins if made else ():
            pinned = graph.tensors[made[tensor % len(made)]]
            sched.set_tensor_backend(graph, pinned, sched.backends[device % self.n_devices])
        if self.cut and graph.nodes:
            n = len(graph.nodes)
            sched.set_cut(graph, [self.cut[i * len(self.cut) // n] % self.n_devices for i in range(n)])

    def given(self, batch: list[Any], k: int) -> list[Any]:
        """Inputs as a caller has them: mostly NumPy arrays, else arrays on some device."""
        given = []
        for i, x in enumerate(batch):
            device = self.inputs[(k + i) % len(self.inputs)]
            plain = device < 0 and not is_key(x)
            given.append(x.copy() if plain else jax.device_put(x, jax.devices()[device % self.n_devices]))
        return given


SMALL = st.integers(0, 20)
FUNCTIONS = st.builds(
    Function,
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=2).map(tuple),
    st.lists(st.sampled_from(KINDS), max_size=3).map(tuple),
    st.lists(STEPS, min_size=1, max_size=7).map(tuple),
    st.lists(SMALL, max_size=3).map(tuple),
    st.booleans(),
)
PINS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), max_size=3).map(tuple)
CUTS = st.lists(st.integers(0, 3), max_size=6).map(tuple)


def places(n_devices: int) -> st.SearchStrategy[Places]:
    device = st.integers(0, n_devices - 1)
    hows = st.sampled_from(["placed", "placed", "array", "numpy", "everywhere"])
    return st.builds(
        Places,
        st.just(n_devices),
        st.sampled_from(["auto", "auto", "shared", "own"]),
        st.booleans(),
        st.lists(st.tuples(hows, device), min_size=1, max_size=3).map(tuple),
        st.lists(st.sampled_from([-1, -1, -1, 0, 1]), min_size=1, max_size=3).map(tuple),
        PINS,
        CUTS,
        st.lists(SMALL, max_size=5).map(tuple),
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n_devices", [1, 2, 3, 4])
def test_a_drawn_function_equals_jit_whatever_is_placed_where(n_devices: int) -> None:
    @settings(max_examples=N_EXAMPLES // 4)
    @given(
        function=FUNCTIONS,
        where=places(n_devices),
        n_copies=st.sampled_from([2, 3, 4, "auto"]),
        drops=st.sets(st.integers(0, 5), max_size=3),
    )
    def equals_jit(function: Function, where: Places, n_copies: Any, drops: set[int]) -> None:
        batches = [function.batch(k) for k in range(6)]
        params = {"w": [array_of(kind, seed=50 + i) for i, kind in enumerate(function.weights)], "none": None}
        oracle = jit(lambda params, *args: function(params, *args))
        want = [as_numpy(oracle(params, *function.args(batch))) for batch in batches]
        exact: dict[int, list[bytes]] = {}
        for n in (1, n_copies):
            for k, got in enumerate(asyncio.run(evaluated(function, where, n, batches, drops))):
                if got is not None:
                    assert_like(got, want[k], tolerance(function.steps))
                    assert exact.setdefault(k, bits(got)) == bits(got), "it depends on n_copies"

    equals_jit()


async def evaluated(function: Function, where: Places, n_copies: Any, batches: list[Any], drops: set[int]) -> list[Any]:
    """The result for each batch; None for one that was cancelled in time."""

    def model(params: Any, *args: Any) -> Any:
        return function(params, *args, order=where.order)

    backends = [ap.open_backend(f"cpu:{i}", dispatch=where.dispatch) for i in range(where.n_devices)]
    async with ap.Scheduler(backends, n_copies=n_copies, op_offload=where.op_offload) as sched:
        graph = ap.trace(model, await where.params(function, sched), *function.args(batches[0]))
        where.decide(sched, graph)
        running = []
        for k, batch in enumerate(batches):
            given = where.given(batch, k)
            running.append(await sched.graph_compute_async(graph, *function.args(given)))
            for x in given:
                if isinstance(x, np.ndarray):
                    x[...] = 0
            if k in drops:
                running[-1].cancel()
        results = [None if await cancelled(evaluation) else as_numpy(evaluation.result()) for evaluation in running]
        assert all(result is not None or k in drops for k, result in enumerate(results))
    for backend in backends:
        await backend.aclose()
    return results


# Steps of states ---------------------------------------------------------------------------------

LEAVES = {"a": "float32[2,3]", "b": "float32[2,3]", "n": "int32[]", "e": "float32[0,3]"}
CHANGES = st.fixed_dictionaries(
    {
        "a": st.sampled_from(["keep", "swap", "overwrite", "write", "write twice"]),
        "b": st.sampled_from(["keep", "swap", "overwrite", "write", "write twice"]),
        "n": st.sampled_from(["keep", "count", "overwrite"]),
        "e": st.sampled_from(["keep", "overwrite"]),
    }
)
STATE_ACTS = st.tuples(
    st.sampled_from(["step"] * 6 + ["cancel", "snapshot", "fork", "reset", "restore"]),
    st.integers(0, 1),
    st.integers(0, 3),
)


@pytest.mark.timeout(300)
@given(
    changes=st.lists(CHANGES, min_size=1, max_size=2),
    steps=st.lists(STEPS, max_size=4),
    outputs=st.lists(st.integers(0, 20), max_size=2),
    places=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    n_devices=st.integers(1, 4),
    n_copies=st.integers(1, 4),
    acts=st.lists(STATE_ACTS, min_size=1, max_size=12),
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
    oracles = [jit(model) for model in models]
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


# Everything at once ------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@given(
    specs=SPECS,
    n_devices=st.integers(1, 4),
    n_copies=st.integers(1, 4),
    n_states=st.integers(1, 3),
    cuts=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    planned=st.booleans(),
    acts=ACTS,
)
def test_whatever_is_submitted_cancelled_held_up_and_goes_wrong(
    specs: Any, n_devices: int, n_copies: int, n_states: int, cuts: Any, planned: bool, acts: Any
) -> None:
    functions = [function_of(spec) for spec in specs]
    world = Real(functions)

    async def main() -> None:
        async with ap.Scheduler([f"cpu:{i}" for i in range(n_devices)], n_copies=n_copies) as sched:
            for function, cut in zip(functions, cuts, strict=False):
                sched.set_cut(function.graph, function.cut(n_devices, cut))
            play = Play(world, sched, [f.graph for f in functions], n_states)
            for state in play.states if planned else ():
                await sched.alloc_graph(functions[0].graph, state=state)
            await play.run(acts)
            await sched.synchronize()
            settled(sched)
            play.check()

    asyncio.run(main())
