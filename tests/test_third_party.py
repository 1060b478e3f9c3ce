"""A backend of another package, found by its entry point, that implements no more than it must."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aiopipe as ap
from models import assert_close, batch, mlp, mlp_params, oracle
from simgraphs import array, chain, unsplit

PACKAGE = Path(__file__).parent / "third_party"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were installed: what an installer writes is put on the path beside its code."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n", encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    lines += ["broken = abacus:there_is_no_such_name", "number = abacus:N_DEVICES"]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    registry = dict(sys.modules["aiopipe.registry"]._registry)
    monkeypatch.setattr("aiopipe.registry._registry", registry)
    monkeypatch.syspath_prepend(str(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [entry.name for entry in entry_points(group="aiopipe.backends", name="abacus")] == ["abacus"]
    yield
    sys.modules.pop("abacus", None)


pytestmark = pytest.mark.usefixtures("installed")


def affine(params: list[Any], x: Any) -> Any:
    for w in params:
        x = x @ w + 1
    return x


class TestRegistry:
    def test_it_is_found_by_its_entry_point(self) -> None:
        assert {"abacus", "cpu", "gpu", "tpu", "sim"} <= set(ap.registered_backends())
        backend = ap.open_backend("abacus:1")
        assert backend.name == "abacus:1" and backend.device.name == "abacus:1"
        with pytest.raises(ap.PlacementError, match="there are 2"):
            ap.open_backend("abacus:2")

    def test_a_name_that_is_registered_hides_an_entry_point(self) -> None:
        ap.register_backend("abacus", lambda params, dispatch: ap.open_backend("cpu:2"))
        assert ap.open_backend("abacus:0").name == "cpu:2"

    def test_entry_points_that_do_not_work(self) -> None:
        with pytest.raises(ap.PlacementError, match=r"'broken' cannot be loaded .*there_is_no_such_name"):
            ap.open_backend("broken")
        with pytest.raises(ap.PlacementError, match=r"'number': its entry point .* is a int, expected a function"):
            ap.open_backend("number:1")
        with pytest.raises(ap.PlacementError, match="one of the backends abacus, broken, cpu"):
            ap.open_backend("nobody:1")

    def test_a_factory_that_makes_no_backend(self) -> None:
        ap.register_backend("none", lambda params, dispatch: None)  # type: ignore[arg-type,return-value]
        with pytest.raises(ap.PlacementError, match="opening 'none:3' gave a NoneType, expected a Backend"):
            ap.open_backend("none:3")

    def test_devices_and_their_capabilities(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ap.open_backend("abacus")
        monkeypatch.setattr("aiopipe.registry.entry_points", lambda **_: ())  # the broken ones are asked, too
        found = {device.name: device for device in ap.devices()}
        assert {"abacus:0", "abacus:1", "cpu:0", "cpu:5"} <= found.keys()
        assert found["abacus:0"].capabilities == ap.Capabilities(
            is_async=False, host_buffer=False, borrows_host=False, events=False
        )
        assert found["cpu:0"].capabilities == ap.Capabilities(True, True, True, True)


class TestMinimum:
    async def test_in_a_scheduler_between_others(self) -> None:
        params, x = mlp_params(4), batch()
        async with ap.Scheduler(["abacus:0", "cpu:1", "cpu:0"], n_copies=3) as sched:
            abacus, cpu = sched.backends[:2]
            weights = await ap.place(params, {"[02]": abacus, "*": cpu})
            graph = ap.trace(affine, weights, x)
            evaluations = [await sched.graph_compute_async(graph, x + k) for k in range(9)]
            for k, evaluation in enumerate(evaluations):
                assert_close(await evaluation, oracle(affine, params, x + k))
            plan = await sched.plan(graph)
            assert {plan.devices[split.backend].name for split in plan.splits} == {"abacus:0", "cpu:1"}

    async def test_what_it_lacks_goes_elsewhere(self) -> None:
        params, x = mlp_params(2), batch()
        async with ap.Scheduler(["abacus:0", "cpu:0"]) as sched:
            weights = await ap.place(params, {"*": sched.backends[0]})
            graph = ap.trace(mlp, weights, x)
            assert_close(await sched.graph_compute(graph, x), oracle(mlp, params, x))
            names = {node.op: sched.get_tensor_backend(graph, graph.tensors[node.outputs[0]]) for node in graph.nodes}
            assert names["tanh"] is sched.backends[1] and names["dot_general"] is sched.backends[0]

    async def test_its_failures_name_it(self) -> None:
        def boom(w: Any, x: Any) -> Any:
            def fail(_: Any) -> Any:
                raise ValueError("beads fell off")

            return jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * w

        async with ap.Scheduler(["abacus:0", "cpu:0"]) as sched:
            weights = await ap.place(np.float32(2), {"*": sched.backends[0]})
            graph = ap.trace(boom, weights, batch())
            with pytest.raises(ap.EvaluationError, match="abacus:0") as failed:
                await sched.graph_compute(graph, batch())
            assert "beads fell off" in str(failed.value.__cause__)

    async def test_by_hand(self) -> None:
        params, x = mlp_params(3), batch()
        async with ap.open_backend("abacus:1") as backend, ap.open_backend("cpu:1") as cpu:
            graph = ap.trace(affine, params, x)
            plan = await backend.graph_plan_create(graph)
            assert_close(await backend.graph_plan_compute(plan, x), oracle(affine, params, x))
            backend.graph_plan_free(plan)
            first = cpu.graph_compute_async(graph, x)
            there = cpu.event_new()
            assert there is not None
            cpu.event_record(there)
            backend.event_wait(there)  # its device has no events, but its queue can wait for others'
            second = backend.graph_compute_async(graph, jnp.ones_like(x))
            assert_close(await second, oracle(affine, params, np.ones_like(x)))
            assert first.done()
            assert_close(await backend.graph_compute(graph, await first), oracle(affine, params, await first))

    async def test_it_has_no_events(self) -> None:
        async with ap.open_backend("abacus:0") as backend:
            assert backend.event_new() is None
            with pytest.raises(ap.PlacementError, match=r"abacus:0 cannot record .*None.* await synchronize"):
                backend.event_record(None)
            with pytest.raises(ap.PlacementError, match="abacus:0 cannot record"):
                backend.event_record(ap.Event())
            with pytest.raises(ap.PlacementError, match="abacus:0 cannot wait for None"):
                backend.event_wait(None)  # type: ignore[arg-type]
            await backend.synchronize()

    async def test_hand_built_graphs(self) -> None:
        graph = chain(3)
        async with ap.open_backend("abacus:0") as backend:
            np.testing.assert_array_equal(await backend.graph_compute(graph, array(1)), unsplit(graph, array(1)))
