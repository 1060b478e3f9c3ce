"""Backends on other machines, as Ray actors: ``open_backend("ray:gpu:0")``.

Each backend is one asyncio actor that owns a JAX client of its own; this process stays the only one that decides.
Programs travel as StableHLO (`jax.export`), values as NumPy arrays; weights, intermediate values and states stay with
the actor and have handles here.

Ray is an extra, ``pip install 'aiopipe[ray]'``, on every machine: the workers import aiopipe, so each needs the same
Python, aiopipe and Ray, and a JAX (with its own accelerator's plugin) that is no older than the one here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from typing import Any

from ..backend import Backend, Dispatch
from ..errors import PlacementError
from .remote import RemoteBackend, RemoteDevice
from .remote_actor import Command, RemoteActor, Worker

__all__ = ["open_ray"]

START_S = 120.0
"""How long an actor may take to start: its process, JAX, and a place in the cluster."""

MESSAGES = 1000
"""How many messages an actor works on at a time; others wait in Ray."""

_SPEC = re.compile(r"(?P<device>(?P<platform>[a-z]+)(:\d+)?)?(@(?P<node>[^#]+))?(#(?P<label>\w+))?")
_PLATFORMS = ("cpu", "gpu", "tpu")


def open_ray(params: str = "", *, dispatch: Dispatch = "auto", options: Mapping[str, Any] | None = None) -> Backend:
    """The factory: ``open_backend("ray:cpu:0@10.0.0.7#a")`` calls it with what comes after the first colon.

    Nothing is started before the backend is first used; then an actor is, off the event loop. Ray is initialized
    if it is not by then: ``ray.init()``, which joins the cluster of ``RAY_ADDRESS`` or of this machine, or starts one.

    Args:
        params: ``device[@node][#label]``. *device* is what the actor opens where it runs, ``cpu:0`` by default. Ray
            gives each actor GPUs of its own, which are counted from 0 there, so ``gpu:0`` is any free GPU. *node* is
            an address, a host name or a node id of Ray's, without which Ray chooses. *label* tells two backends with
            the same device and node apart.
        dispatch: as for every backend; its splits have a lane of their own unless it is ``"shared"``.
        options: of Ray's ``ActorClass.options``, such as ``{"num_gpus": 0.5}`` or ``{"runtime_env": {...}}``. By
            default one GPU for a GPU, else one CPU.

    Raises:
        PlacementError: Ray is not installed, or the params are not of that form.
    """
    found = _SPEC.fullmatch(params)
    if found is None or found["platform"] not in (*_PLATFORMS, None):
        raise PlacementError(
            f"unknown device 'ray:{params}': expected 'ray:device', 'ray:device@node' or either with '#label', where "
            "device is one such as cpu:0 or gpu:0"
        )
    if find_spec("ray") is None:
        raise _needs_extra(f"ray:{params}")
    spec, node, name = found["device"] or "cpu:0", found["node"], f"ray:{params or 'cpu:0'}"
    wanted = {**({"num_gpus": 1} if spec.startswith("gpu") else {"num_cpus": 1}), **(options or {})}
    return RemoteBackend(RemoteDevice(name, spec), lambda: _RayCarrier(name, spec, node, wanted), dispatch=dispatch)


def _needs_extra(name: str) -> PlacementError:
    return PlacementError(f"{name} needs the extra: pip install 'aiopipe[ray]'")


_initializing = threading.Lock()


def _ray(name: str) -> Any:
    """The module, initialized. Blocks."""
    try:
        import ray
        from ray.util import scheduling_strategies  # noqa: F401 - an attribute of `ray` from here on
    except ImportError as error:
        raise _needs_extra(name) from error
    with _initializing:
        if not ray.is_initialized():
            _initialize(ray)
    return ray


def _initialize(ray: Any) -> None:
    """`ray.init`, in a thread that stays: Linux kills the processes of a local cluster when the *thread* that started
    them ends, for Ray asks it to (PR_SET_PDEATHSIG)."""
    done = threading.Event()
    failed: list[BaseException] = []

    def stay() -> None:
        try:
            ray.init()
        except BaseException as error:
            failed.append(error)
        done.set()
        if not failed:
            threading.Event().wait()

    threading.Thread(target=stay, name="ray-init", daemon=True).start()
    done.wait()
    if failed:
        raise PlacementError(f"Ray cannot be initialized: {failed[0]}; call ray.init yourself, first") from failed[0]


class _RayCarrier:
    """Carries messages to a new actor. Blocks until the actor is there.

    Args:
        name: of the backend, for messages.
        spec: what the actor opens.
        node: where it shall run, or None.
        options: of the actor.
    """

    def __init__(self, name: str, spec: str, node: str | None, options: Mapping[str, Any]) -> None:
        self._name = name
        self._ray = ray = _ray(name)
        self._gone = threading.Event()
        options = {"max_concurrency": MESSAGES, **options}
        if node is not None:
            options["scheduling_strategy"] = _on(ray, name, node)
        # Never restarted: the values that handles here stand for would be gone all the same.
        self._actor = ray.remote(RemoteActor).options(**options, max_restarts=0).remote(spec)
        try:
            self.worker: Worker = ray.get(self._actor.open.remote(), timeout=START_S)
        except Exception as error:
            ray.kill(self._actor)
            raise self._why_not(error, options) from error

    def _why_not(self, error: Exception, options: Mapping[str, Any]) -> PlacementError:
        if isinstance(error, self._ray.exceptions.GetTimeoutError):
            asked = {key: value for key, value in options.items() if key in ("num_cpus", "num_gpus", "resources")}
            return PlacementError(
                f"{self._name} found no place within {START_S:.0f} s: it asks for {asked}, the cluster has "
                f"{self._ray.available_resources()} free; close another actor, add a node, or give other options"
            )
        cause = error.cause if isinstance(error, self._ray.exceptions.RayTaskError) else error
        return PlacementError(f"{self._name} cannot be opened on its machine: {cause}")

    def send(
        self, number: int, commands: Sequence[Command], then: Callable[[Any, BaseException | None, bool], None]
    ) -> None:
        exceptions = self._ray.exceptions

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                then(future.result(), None, False)
            else:
                lost = isinstance(error, exceptions.RayError) and not isinstance(error, exceptions.RayTaskError)
                then(None, error, lost)

        self._actor.execute.remote(number, commands).future().add_done_callback(answered)

    def watch(self, lost: Callable[[str], None]) -> None:
        def ended(future: Future[Any]) -> None:
            self._gone.set()
            lost(_reason(future.exception()))

        self._actor.watch.remote().future().add_done_callback(ended)

    def end(self, timeout_s: float) -> None:
        if self._ray.is_initialized():  # else its processes have ended with Ray
            self._ray.kill(self._actor)
            self._gone.wait(timeout_s)


def _reason(error: BaseException | None) -> str:
    """What Ray says of the end of an actor, in one line."""
    lines = [line.strip() for line in str(error or "it ended").splitlines()]
    return " ".join(line for line in lines if line and not re.match(r"(class_name|actor_id|pid|namespace|ip):", line))


def _on(ray: Any, name: str, node: str) -> Any:
    """Ray's way to say: on that node and no other."""
    alive = [found for found in ray.nodes() if found["Alive"]]
    for found in alive:
        if node in (found["NodeID"], found["NodeManagerAddress"], found["NodeManagerHostname"]):
            return ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(found["NodeID"], soft=False)
    have = ", ".join(f"{found['NodeManagerAddress']} ({found['NodeManagerHostname']})" for found in alive)
    raise PlacementError(f"{name} names the node {node!r}, but the cluster has {have}: give one of these")
