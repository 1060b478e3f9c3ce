"""JAX's switches: heeded as they are where a call begins, and kept out of everybody else's work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from aiopipe import _jax, _jax_memory, _jax_nans, _jax_settings
from aiopipe.graph import Kind
from aiopipe.sched.plan import make_plan
from aiopipe.tensor_range import Range
from gates import eventually, gated_scheduler
from graphs import gpus
from models import assert_close, batch, mlp, mlp_params, oracle

DEVICES = ["cpu:0", "cpu:1"]
PARAMS = mlp_params(4)


@contextlib.contextmanager
def globally(name: str, value: Any) -> Iterator[None]:
    """A setting of the whole process, as `jax.config.update` makes it."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def switch(name: str, value: Any, how: str) -> contextlib.AbstractContextManager[Any]:
    return globally(f"jax_{name}", value) if how == "globally" else getattr(jax, name)(value)


HOW = pytest.mark.parametrize("how", ["globally", "around the call"])


def log_of_negative(params: list[Any], x: Any) -> Any:
    x = x @ params[0]
    x = jnp.log(-jnp.abs(x))  # not a number
    for w in params[1:]:
        x = jnp.tanh(x @ w)
    return x


def divides_by_zero(params: list[Any], x: Any) -> Any:
    x = x @ params[0]
    x = 1.0 / (x - x)  # infinite
    for w in params[1:]:
        x = x @ jnp.abs(w)
    return x


async def halves(sched: ap.Scheduler, params: list[Any]) -> Any:
    n = len(params)
    return await ap.place(params, lambda path: sched.backends[int(path) * 2 // n])


def test_every_switch_of_jax_is_decided_upon() -> None:
    """A new version of JAX may have a new one: it belongs in one of the two lists."""
    kind = type(jax.enable_x64)
    found = {name for name in dir(jax) if isinstance(getattr(jax, name), kind)} | {"disable_jit", "transfer_guard"}
    decided = {*_jax_settings.CONFIG_NAMES, *_jax_settings.LEFT_OUT}
    assert found <= decided
    assert not set(_jax_settings.CONFIG_NAMES) & set(_jax_settings.LEFT_OUT)


# Switches that change results ------------------------------------------------------------------------


@HOW
async def test_x64(how: str) -> None:
    def model(w: Any, x: Any) -> Any:
        return x @ w / jnp.arange(1.0, 9.0)  # of the default float type

    w, x = PARAMS[0], batch()
    with jax.enable_x64(True):
        wide = oracle(model, w, x)
    async with ap.Pipeline(model, w, devices=DEVICES) as pipe:
        for _ in range(2):
            assert_close(await pipe(x), oracle(model, w, x))
            with switch("enable_x64", True, how):
                assert_close(await pipe(x), wide)
                assert_close([y async for y in pipe.stream([x])], [wide])
        assert pipe.statistics().planned == 2


@HOW
async def test_x64_off_where_it_is_on(how: str) -> None:
    """NumPy arrays are narrowed, as by `jax.jit`. Arrays that are on a device cannot be: that is said at once."""

    def model(w: Any, x: Any) -> Any:
        return x * w

    wide = np.ones(3)
    with globally("jax_enable_x64", True):
        on_device = jnp.ones(3)
        async with ap.Scheduler(["cpu:0"]) as sched:
            placed = await ap.place(wide, {"*": sched.backends[0]})
            with switch("enable_x64", False, how):
                narrow = ap.trace(model, wide, wide)
                for w, x in ((placed, wide), (on_device, wide), (wide, on_device)):
                    with pytest.raises(ap.TraceError, match="is float64 on its device, but 64 bit types are off here"):
                        ap.trace(model, w, x)
            result = await sched.graph_compute(ap.trace(model, placed, on_device), on_device)
            assert (result.dtype, result.shape) == (np.float64, (3,))
            with switch("enable_x64", False, how):
                assert (await sched.graph_compute(narrow, wide)).dtype == np.float32
                with pytest.raises(ap.AiopipeError, match="float64"):
                    await sched.graph_compute(narrow, on_device)


@HOW
async def test_default_matmul_precision(how: str) -> None:
    def model(w: Any, x: Any) -> Any:
        return x @ w

    async with ap.Scheduler(["cpu:0"]) as sched:
        with switch("default_matmul_precision", "highest", how):
            graph = ap.trace(model, PARAMS[0], batch())
        (dot,) = [node for node in graph.nodes if node.op == "dot_general"]
        assert "HIGHEST" in str(dot.fn.eqn.params["precision"])  # type: ignore[attr-defined]
        assert_close(await sched.graph_compute(graph, batch()), oracle(model, PARAMS[0], batch()))
    async with ap.Pipeline(model, PARAMS[0], devices=["cpu:0"]) as pipe:
        await pipe(batch())
        with switch("default_matmul_precision", "highest", how):
            await pipe(batch())
        assert pipe.statistics().compiled == 2


@HOW
async def test_default_device_moves_nothing(how: str) -> None:
    """Where things are computed is what aiopipe was told: by its devices, and by arrays that are committed."""

    def model(w: list[Any], x: Any) -> Any:
        return mlp(w, x) + jnp.arange(8.0)

    async with ap.Pipeline(model, PARAMS, devices=DEVICES) as pipe:
        with switch("default_device", jax.devices()[3], how):
            y = await pipe(batch())
            assert {d.id for d in y.devices()} == {1}
            assert_close(y, oracle(model, PARAMS, batch()))
            assert [split.backend for split in (await pipe.plan(batch())).splits] == [0, 1]


@HOW
async def test_rank_promotion(how: str) -> None:
    def model(w: Any, x: Any) -> Any:
        return x + w

    x, w = batch(), batch()[0]
    async with ap.Pipeline(model, w, devices=["cpu:0"]) as pipe:
        with switch("numpy_rank_promotion", "raise", how):
            with pytest.raises(ap.TraceError, match="rank"):
                await pipe(x)
            with pytest.raises(ValueError, match="rank"):
                ap.trace(model, w, x)
        assert_close(await pipe(x), oracle(model, w, x))


@HOW
async def test_dtype_promotion(how: str) -> None:
    def model(w: Any, x: Any) -> Any:
        return x + w

    x, w = batch(), np.arange(8)
    async with ap.Pipeline(model, w, devices=["cpu:0"]) as pipe:
        with switch("numpy_dtype_promotion", "strict", how):
            with pytest.raises(ap.TraceError, match="implicit dtype promotion"):
                await pipe(x)
        assert_close(await pipe(x), oracle(model, w, x))


async def test_the_kind_of_keys_that_a_function_makes() -> None:
    def model(w: Any, x: Any) -> Any:
        return jax.random.key_data(jax.random.key(0)).shape[0] * x

    async with ap.Pipeline(model, np.float32(0), devices=["cpu:0"]) as pipe:
        one = np.float32(1)
        assert float(await pipe(one)) == 2
        with jax.default_prng_impl("rbg"):
            assert float(await pipe(one)) == 4
        assert float(await pipe(one)) == 2


@pytest.mark.parametrize("setting", [("numpy_rank_promotion", "raise"), ("numpy_dtype_promotion", "strict")])
async def test_strict_settings_hold_for_the_users_code_alone(setting: tuple[str, str]) -> None:
    """What aiopipe does with JAX itself keeps them, or is not subject to them."""
    array = jnp.arange(24.0).reshape(4, 6)
    with globally(f"jax_{setting[0]}", setting[1]):
        where = Range(offset=1, n=2, stride=8, size=3)
        np.testing.assert_array_equal(_jax_memory.read_on_device(array, where), [[1, 2, 3], [9, 10, 11]])
        made = _jax_memory.write_on_device(array, where, np.zeros((2, 3), np.float32))
        assert float(made.sum()) == 276 - 36
        async with ap.Pipeline(mlp, PARAMS, devices=DEVICES) as pipe:
            state = ap.State(np.zeros((2, 8), np.float32))
            assert_close(await pipe(batch()), oracle(mlp, PARAMS, batch()))
            await state.snapshot()


# Values that are not numbers -------------------------------------------------------------------------


@HOW
@pytest.mark.parametrize(
    ("setting", "model", "op"), [("debug_nans", log_of_negative, "log"), ("debug_infs", divides_by_zero, "div")]
)
async def test_an_invalid_value_fails_the_evaluation_that_makes_it(
    setting: str, model: Any, op: str, how: str
) -> None:
    async with ap.Pipeline(model, PARAMS, devices=DEVICES) as pipe, ap.Pipeline(mlp, PARAMS, devices=DEVICES) as other:
        await pipe(batch())  # nobody has asked yet
        with switch(setting, True, how):
            with pytest.raises(ap.EvaluationError) as caught:
                await pipe(batch())
            assert_close(await other(batch()), oracle(mlp, PARAMS, batch()))
        error = caught.value
        assert isinstance(error.__cause__, FloatingPointError)
        assert f"encountered in {op} at" in str(error.__cause__) and "test_jax_settings.py" in error.source
        assert (error.split, error.backend) == (0, "cpu:0") and op in error.node
        assert f"failed in split 0 on 'cpu:0', in '{op}' at" in str(error)
        await pipe(batch())  # as before
        assert pipe.statistics().failed == 1


async def test_the_split_that_made_it_is_named_and_not_those_that_read_it() -> None:
    def model(w: list[Any], x: Any) -> Any:
        return jnp.exp(jnp.sqrt(mlp(w[:2], x) - 2.0) @ w[2]) @ w[3]

    async with ap.Scheduler(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]) as sched:
        weights = await ap.place(PARAMS, lambda path: sched.backends[int(path)])
        with jax.debug_nans(True):
            graph = ap.trace(model, weights, batch())
        runs = [await sched.graph_compute_async(graph, batch(seed=s)) for s in range(6)]
        for run in runs:
            with pytest.raises(ap.EvaluationError, match="encountered in sqrt at") as caught:
                await run
            assert caught.value.backend in ("cpu:1", "cpu:2") and "sqrt" in caught.value.node
        await sched.synchronize()
        assert sched.statistics().in_flight == 0


async def test_others_go_on_beside_those_that_fail() -> None:
    async with ap.Scheduler(DEVICES, n_copies=4) as sched:
        weights = await halves(sched, PARAMS)
        with jax.debug_nans(True):
            checked = ap.trace(lambda w, x: jnp.sqrt(mlp(w, x) + 2.0) * x, weights, batch())
        nan = np.full((2, 8), np.nan, np.float32)
        runs = [await sched.graph_compute_async(checked, nan if s % 2 else batch(seed=s)) for s in range(8)]
        for s, run in enumerate(runs):
            if s % 2:
                with pytest.raises(ap.EvaluationError, match=r"in whose operand 'x'.* there is one already"):
                    await run
            else:
                want = oracle(lambda w, x: jnp.sqrt(mlp(w, x) + 2.0) * x, PARAMS, batch(seed=s))
                assert_close(await run, want)


async def test_a_value_that_is_masked_within_a_split_is_nobodys_fault() -> None:
    """As with a jitted function: what it returns counts."""

    def model(w: list[Any], x: Any) -> Any:
        y = x @ w[0]
        return jnp.where(y > 0, jnp.log(y), 0.0) @ w[1]

    async with ap.Pipeline(model, PARAMS[:2], devices=["cpu:0"]) as pipe:
        with jax.debug_nans(True):
            assert_close(await pipe(batch()), oracle(model, PARAMS[:2], batch()))


async def test_an_invalid_value_marks_the_state_that_it_would_have_become() -> None:
    def step(w: Any, state: Any, x: Any) -> Any:
        state = state + jnp.log(x)
        return state * w, state

    async with ap.Pipeline(step, np.float32(2), devices=["cpu:0"]) as pipe:
        state = ap.State(np.zeros(3, np.float32))
        good, bad = np.ones(3, np.float32), -np.ones(3, np.float32)
        with jax.debug_nans(True):
            await pipe(good, state=state)
            with pytest.raises(ap.EvaluationError, match="encountered in log"):
                await pipe(bad, state=state)
            with pytest.raises(ap.StateError):
                await pipe(good, state=state)
            await state.reset()
            assert_close(await pipe(good, state=state), np.zeros(3, np.float32))


async def test_invalid_values_that_are_only_carried_are_no_fault() -> None:
    """States, tensors and weights may hold them: aiopipe moves them, and looks at none."""
    nan = np.full((2, 3), np.nan, np.float32)
    with globally("jax_debug_nans", True):
        async with ap.Pipeline(lambda w, s, x: (x * 1.0, s), nan, devices=["cpu:0"]) as pipe:
            state = ap.State(nan)
            await pipe(batch(), state=state)
            assert np.isnan((await state.snapshot()).value).all()
            assert np.isnan((await (await state.fork()).snapshot()).value).all()
        array = jnp.asarray(np.zeros(4, np.float32))
        where = Range(offset=0, n=1, stride=2, size=2)
        made = _jax_memory.write_on_device(array, where, np.full((1, 2), np.nan, np.float32))
        assert np.isnan(_jax_memory.read_on_device(made, where)).all()


async def test_by_hand_and_observed_it_is_found_as_well() -> None:
    with jax.debug_nans(True):
        graph = ap.trace(log_of_negative, PARAMS, batch())
    async with ap.open_backend("cpu:0") as backend:
        with pytest.raises(ap.EvaluationError, match="failed on 'cpu:0', in log") as caught:
            await backend.graph_compute(graph, batch())
        assert isinstance(caught.value.__cause__, FloatingPointError)
    async with ap.Scheduler(DEVICES) as sched:
        sched.set_eval_callback(lambda tensor, ask: tensor.name.startswith("dot_general") if ask else True)
        with pytest.raises(ap.EvaluationError, match="'log' at") as caught:
            await sched.graph_compute(graph, batch())
        assert "log" in caught.value.node


async def test_an_effect_does_not_happen_again_to_find_who_is_to_blame() -> None:
    seen: list[Any] = []

    def model(w: Any, x: Any) -> Any:
        jax.debug.callback(lambda v: seen.append(v), x[0, 0])
        return jnp.log(x - 10.0)

    with jax.debug_nans(True):
        graph = ap.trace(model, PARAMS, batch())
    async with ap.open_backend("cpu:0") as backend:
        with pytest.raises(ap.EvaluationError, match=r"invalid value \(nan\) in 'out'"):
            await backend.graph_compute(graph, batch())
    assert len(seen) == 1


def test_an_invalid_value_that_no_operation_makes_by_itself() -> None:
    """Fused operations may round in another way; the error says so instead of blaming the last one."""
    with jax.debug_nans(True):
        graph = ap.trace(mlp, PARAMS, batch())
    (program,) = make_plan(graph, gpus(0)).programs
    bad = np.full((2, 8), np.nan, np.float32)
    checked = _jax_nans.checking(lambda *args: [bad], program, jax.devices()[0], graph.config)
    with pytest.raises(FloatingPointError, match="run one by one, make none, so it comes of how the compiler"):
        checked(*[batch() if t.kind is Kind.INPUT else graph.tensors[t.id].source for t in program.inputs])


def test_an_invalid_value_travels_as_what_jax_raises() -> None:
    error = pickle.loads(pickle.dumps(_jax_nans.InvalidValue("invalid value (nan) in x", position=3)))
    assert type(error) is FloatingPointError and error.args == ("invalid value (nan) in x",)


def test_without_the_switch_nothing_is_looked_at() -> None:
    """The executable is called as it would be if there were no such switch."""

    def call(*args: Any) -> Any:
        return args

    device = jax.devices()[0]
    graph = ap.trace(mlp, PARAMS, batch())
    program: Any = None
    assert _jax_nans.checking(call, program, device, graph.config) is call


# Kept out of everybody else's work -------------------------------------------------------------------

DISTURBING = {
    "debug_nans": True,
    "debug_infs": True,
    "disable_jit": True,
    "no_execution": True,
    "transfer_guard": "disallow_explicit",
    "enable_x64": True,
    "numpy_rank_promotion": "raise",
    "numpy_dtype_promotion": "strict",
    "default_matmul_precision": "highest",
    "check_tracer_leaks": True,
}


@pytest.mark.parametrize("name", DISTURBING)
async def test_a_setting_that_another_task_has_open_disturbs_nobody(name: str) -> None:
    """JAX's context managers hold for the thread: for each task that runs while one is open across an `await`."""

    def model(w: list[Any], x: Any) -> Any:
        return jnp.log(mlp(w, x) - 1.0) / jnp.arange(1.0, 9.0)  # nan, of the default float type

    want = oracle(model, PARAMS, batch())
    assert np.isnan(want).all()
    opened, done = asyncio.Event(), asyncio.Event()

    async def other() -> None:
        with getattr(jax, name)(DISTURBING[name]):
            opened.set()
            await done.wait()

    async with ap.Scheduler(DEVICES) as sched, asyncio.TaskGroup() as tasks:
        graph = ap.trace(model, await halves(sched, PARAMS), batch())
        ready = ap.trace(model, await halves(sched, PARAMS), batch())
        await sched.plan(ready)
        await sched.tensor_set(ready.inputs[0], batch())
        tasks.create_task(other())
        await opened.wait()
        try:
            for each in (ready, graph):  # the second is planned and compiled meanwhile
                assert_close(await sched.graph_compute(each, batch()), want)
            await sched.graph_compute_async(ready)
            assert_close(await sched.tensor_get(ready.outputs[0]), want)
        finally:
            done.set()


@pytest.mark.parametrize("split", ["auto", {"*": "cpu:0"}], ids=["auto", "by path"])
async def test_what_is_traced_has_the_settings_of_the_call_and_not_of_the_moment(split: Any) -> None:
    """Between a call and the start of its tracing, another task may change the thread's settings."""

    def model(w: Any, x: Any) -> Any:
        return x * w * jnp.ones(3)

    async with ap.Pipeline(model, np.ones(3, np.float32), devices=["cpu:0"], split=split) as pipe:
        call = asyncio.ensure_future(pipe(np.ones(3, np.float32)))
        opened = asyncio.Event()

        async def other() -> None:
            with jax.enable_x64(True):
                opened.set()
                await call

        leaking = asyncio.ensure_future(other())  # runs when the call has made its own task, and before that begins
        await opened.wait()
        assert (await call).dtype == np.float32
        await leaking


async def test_aiopipe_leaves_no_setting_behind() -> None:
    """Neither in the loop's thread nor in one of its own, whatever happens under it."""
    before, key = _jax.config_snapshot(), _jax.settings_key()
    with jax.enable_x64(True), jax.debug_nans(True):
        inside = _jax.config_snapshot()
        async with ap.Pipeline(log_of_negative, PARAMS, devices=DEVICES) as pipe:
            for x in (batch(), batch(3)):
                with pytest.raises(ap.EvaluationError):
                    await pipe(x)
                assert _jax.config_snapshot() == inside
            seen = await asyncio.to_thread(_jax.config_snapshot)
        assert seen == before
    assert (_jax.config_snapshot(), _jax.settings_key()) == (before, key)


# Transfers, jit, logs, leaks -------------------------------------------------------------------------


@pytest.mark.parametrize("guard", ["disallow", "disallow_explicit", "log"])
@HOW
async def test_transfer_guards_are_for_the_users_own_transfers(
    guard: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every transfer of aiopipe's is in its plan: none is by mistake."""
    x = jax.device_put(batch(), jax.devices()[2])
    with switch("transfer_guard", guard, how):
        async with ap.Pipeline(mlp, PARAMS, devices=DEVICES) as pipe:
            state = ap.State(np.zeros(2, np.float32))
            results = [await pipe(batch()), await pipe(x)]
            results += [y async for y in pipe.stream([batch()])]
            await state.snapshot()
        async with ap.open_backend("cpu:0") as backend:
            results.append(await backend.graph_compute(ap.trace(mlp, PARAMS, batch()), batch()))
    for y in results:
        assert_close(y, oracle(mlp, PARAMS, batch()))
    assert "transfer" not in capfd.readouterr().err


@HOW
async def test_without_jit_it_compiles_all_the_same(how: str) -> None:
    """`jax_disable_jit` shows the user's Python code concrete values, which aiopipe never has while it traces."""

    def model(w: list[Any], x: Any) -> Any:
        def layer(carry: Any, w: Any) -> Any:
            return jnp.tanh(carry @ w), None

        return jax.lax.scan(layer, jax.jit(jnp.sin)(x), jnp.stack(w))[0]

    want = oracle(model, PARAMS, batch())
    disabled = globally("jax_disable_jit", True) if how == "globally" else jax.disable_jit()
    with disabled:
        graph = ap.trace(model, PARAMS, batch())
        assert [node.op for node in graph.nodes].count("scan") == 1
        async with ap.Pipeline(model, PARAMS, devices=DEVICES) as pipe:
            assert_close(await pipe(batch()), want)
            assert pipe.statistics().compiled >= 1
        async with ap.open_backend("cpu:0") as backend:
            assert_close(await backend.graph_compute(graph, batch()), want)


@HOW
async def test_log_compiles(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def logs_me(w: list[Any], x: Any) -> Any:
        return mlp(w, x) + 1

    async with ap.Pipeline(logs_me, PARAMS, devices=DEVICES) as pipe:
        with caplog.at_level(logging.WARNING):
            await pipe(batch(2))
            assert "logs_me" not in caplog.text
            with switch("log_compiles", True, how):
                await pipe(batch(3))
        assert "Finished XLA compilation of jit(logs_me" in caplog.text


@HOW
async def test_tracer_leaks(how: str) -> None:
    kept = []

    def leaks(w: Any, x: Any) -> Any:
        kept.append(x * w)
        return x

    async with ap.Pipeline(mlp, PARAMS, devices=DEVICES) as pipe, ap.Pipeline(leaks, 1.0, devices=DEVICES) as bad:
        with switch("check_tracer_leaks", True, how):
            assert_close(await pipe(batch()), oracle(mlp, PARAMS, batch()))  # aiopipe leaks none
            with pytest.raises(ap.TraceError, match=r"[Ll]eaked"):
                await bad(batch())
        kept.clear()


async def test_a_switch_between_submitting_and_the_end_changes_nothing() -> None:
    async with gated_scheduler() as (sched, graph, gate):
        run = await sched.graph_compute_async(graph, batch())
        await eventually(gate.entered.is_set)
        with globally("jax_debug_nans", True), globally("jax_enable_x64", True), globally("jax_transfer_guard", "log"):
            gate.open.set()
            result = await run
        assert result.dtype == np.float32
        assert_close(result, oracle(gate.fn, mlp_params(2), batch()))
