"""The registry: names of backends, who opens them, and what their devices can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from .backend import Backend, Dispatch
from .devices.base import Device, DeviceType
from .errors import PlacementError

__all__ = [
    "check_distinct",
    "devices",
    "index_of",
    "open_backend",
    "open_backends",
    "register_backend",
    "registered_backends",
    "with_host",
]

Factory = Callable[..., Backend]
_ENTRY_POINTS = "aiopipe.backends"


@dataclass(frozen=True, slots=True)
class _Registration:
    factory: Factory
    devices: Callable[[], Sequence[Device]]


_registry: dict[str, _Registration] = {}


def register_backend(name: str, factory: Factory, *, devices: Callable[[], Sequence[Device]] | None = None) -> None:
    """Make ``open_backend("name:params")`` call ``factory(params, dispatch=...)``.

    Args:
        name: what comes before the colon. A name that is registered already is replaced.
        factory: called with what comes after the colon (``""`` without one) and with ``dispatch``.
        devices: lists the devices that it can open, for `devices()`. Without it, ``factory.devices``
            is taken, if there is one: this is how an entry point lists its own.

    Third parties declare an entry point in the group ``aiopipe.backends`` instead: its name is the
    backend's, its object the factory.

    Raises:
        PlacementError: the name is empty or has a colon.
    """
    if not name or ":" in name:
        raise PlacementError(f"backend name {name!r}: expected a word without a colon")
    if devices is None:
        devices = getattr(factory, "devices", tuple)
    _registry[name] = _Registration(factory, devices)


def registered_backends() -> tuple[str, ...]:
    """The names that `open_backend` knows, sorted: registered ones, and entry points of installed packages."""
    return tuple(sorted(set(_registry) | {entry.name for entry in entry_points(group=_ENTRY_POINTS)}))


def _lookup(name: str) -> _Registration | None:
    if name not in _registry:
        for entry in entry_points(group=_ENTRY_POINTS, name=name):
            register_backend(name, _loaded(entry))
            break
    return _registry.get(name)


def _loaded(entry: Any) -> Factory:
    try:
        factory: Factory = entry.load()
    except Exception as error:  # whatever importing somebody else's package raises
        raise PlacementError(
            f"backend {entry.name!r} cannot be loaded from its entry point {entry.value!r}: {error}; "
            "mend or uninstall the package that declares it"
        ) from error
    if not callable(factory):
        raise PlacementError(
            f"backend {entry.name!r}: its entry point {entry.value!r} is a {type(factory).__name__}, expected a "
            "function from (params, *, dispatch) to a Backend"
        )
    return factory


def open_backend(spec: str, *, dispatch: Dispatch = "auto") -> Backend:
    """Open the backend that a spec names, such as ``"cpu:0"`` or ``"gpu:1"``.

    Args:
        spec: ``"name"`` or ``"name:params"``; what params mean is the backend's own affair.
        dispatch: which lane launches on it (`Backend`).

    Raises:
        PlacementError: nobody registered that name, it has no such device, or its factory made no backend.
    """
    name, _, params = spec.partition(":")
    found = _lookup(name)
    if found is None:
        known = ", ".join(registered_backends())
        raise PlacementError(f"unknown device {spec!r}: expected one of the backends {known}, as in 'cpu:0'")
    backend = found.factory(params, dispatch=dispatch)
    if not isinstance(backend, Backend):
        raise PlacementError(f"opening {spec!r} gave a {type(backend).__name__}, expected a Backend: mend its factory")
    return backend


def open_backends(*specs: str) -> list[Backend]:
    """Open several backends; their order is their priority.

    Raises:
        PlacementError: a spec names no device, or two specs name one.
    """
    backends = [open_backend(spec) for spec in specs]
    check_distinct(backends)
    return backends


def check_distinct(backends: Sequence[Backend]) -> None:
    """Raise `PlacementError` when a device is given twice, or none at all."""
    if not backends:
        raise PlacementError("no backends: give at least one device, as in devices=['cpu:0']")
    seen: set[str] = set()
    for backend in backends:
        if backend.name in seen:
            raise PlacementError(f"device {backend.name!r} is given twice: each device can be one backend only")
        seen.add(backend.name)


def index_of(backends: Sequence[Backend], backend: Backend | str) -> int:
    """The position of a backend, or of the one with that name.

    Raises:
        PlacementError: it is not among them.
    """
    for i, known in enumerate(backends):
        if known is backend or known.name == backend:
            return i
    name = backend if isinstance(backend, str) else backend.name
    raise PlacementError(f"{name!r} is not one of this scheduler's backends: {[b.name for b in backends]}")


def with_host(given: Sequence[Backend | str]) -> tuple[tuple[Backend, ...], list[Backend]]:
    """Backends for a scheduler, a host CPU last (or another host's, behind it); and those that were opened here.

    Args:
        given: backends, or specs of ones to open, in order of priority.

    Raises:
        PlacementError: a spec names no device, a device is given twice, or the host CPU does not come last.
    """
    backends: list[Backend] = []
    opened: list[Backend] = []
    for item in given:
        if isinstance(item, str):
            item = open_backend(item)
            opened.append(item)
        item.check_open()
        backends.append(item)
    check_distinct(backends)
    last = backends[-1].device
    if not last.is_host_cpu:
        host = next((b.name for b in backends if b.device.is_host_cpu), None)
        if host is not None and last.props.remote and last.props.type is DeviceType.CPU:
            return tuple(backends), opened  # a slow one of the lowest priority, with the host before it
        if host is not None:
            raise PlacementError(
                f"{host!r} comes before {backends[-1].name!r}: give the host CPU last, its priority is the lowest"
            )
        backends.append(open_backend("cpu:0"))
        opened.append(backends[-1])
    return tuple(backends), opened


def devices() -> tuple[Device, ...]:
    """Every device that a registered backend, or one of an installed package, can open.

    `Device.capabilities` says what each can do (asynchronous, host buffers, borrowed memory, events), and
    `Device.props` has its type, memory and rough speeds.

    Raises:
        PlacementError: an installed package's entry point cannot be loaded.
    """
    found: list[Device] = []
    for name in (*_registry, *(name for name in registered_backends() if name not in _registry)):
        registration = _lookup(name)
        if registration is not None:
            found += registration.devices()
    return tuple(found)
