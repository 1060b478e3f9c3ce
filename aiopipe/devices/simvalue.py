"""What a simulated cluster is made of: devices, their queues, the links between them, and values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..backend import Backend
from ..errors import BackendLostError, TensorError
from ..graph import Node, Tensor
from .base import Device, DeviceProps, Program
from .clock import VirtualClock

__all__ = [
    "PENDING",
    "Link",
    "SimDevice",
    "SimValue",
    "Spec",
    "Unit",
    "arrive",
    "evaluate",
    "frozen",
    "numpy_dtype",
    "overlay",
    "read",
    "spec_of",
]

PENDING: Any = type("_Pending", (), {"__repr__": lambda self: "<pending>"})()
"""Data of a value whose virtual completion has not happened yet (in a cluster that computes)."""


class SimDevice(Device):
    """A device that exists in virtual time. All of them are fit to be the last backend.

    Attributes:
        index: its number in the cluster.
        unsupported_ops: names of the ops that it refuses.
    """

    def __init__(self, index: int, props: DeviceProps, unsupported_ops: Collection[str] = ()) -> None:
        self.name = f"sim:{index}"
        self.index = index
        self.props = props
        self.unsupported_ops = frozenset(unsupported_ops)

    @property
    def is_host_cpu(self) -> bool:
        return True

    def supports_op(self, node: Node) -> bool:
        return node.op not in self.unsupported_ops


class Spec(NamedTuple):
    """What is known of a value that came from the host; a `Tensor` says the same of a result."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Link:
    """One way between two memories: what it carries goes one after the other."""

    __slots__ = ("bytes_per_s", "free_at", "latency_s")

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0


class Unit:
    """What exists once for each device, however many backends are opened on it: its queue."""

    __slots__ = ("arrives_at", "backend", "busy_s", "clock", "device", "fail_allocation", "free_at", "inbound")

    def __init__(self, device: SimDevice, clock: VirtualClock) -> None:
        self.device = device
        self.clock = clock
        self.backend: Backend | None = None  # the first one that was opened on it
        self.free_at = 0.0
        self.arrives_at = 0.0
        self.busy_s = 0.0
        self.fail_allocation = False
        self.inbound: dict[Unit | None, Link] = {}


class SimValue:
    """A value on a simulated device: there, or known to be there at `ready_at`.

    Attributes:
        ready_at: virtual time of its completion, in seconds.
        error: why it failed; means something from `ready_at` on.
        data: the array, in a cluster that computes; else None.
        spec: shape, dtype and size.
        unit: where it is; None once its memory was donated to a launch.
    """

    __slots__ = ("__weakref__", "data", "error", "ready_at", "spec", "unit")

    def __init__(
        self, unit: Unit, spec: Tensor | Spec, ready_at: float, error: BaseException | None, data: Any
    ) -> None:
        self.unit: Unit | None = unit
        self.spec = spec
        self.ready_at = ready_at
        self.error = error
        self.data = data

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        """The NumPy dtype; its name, for a type that NumPy lacks."""
        return numpy_dtype(self.spec.dtype) or self.spec.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.spec.nbytes

    @property
    def backend(self) -> Backend | None:
        """The cluster's backend that holds it; None once its memory was donated to a launch."""
        return None if self.unit is None else self.unit.backend

    def is_deleted(self) -> bool:
        """Whether its memory was donated to a launch."""
        return self.unit is None

    def is_ready(self) -> bool:
        """Whether it is there (or has failed) now, in virtual time."""
        return self.unit is None or (self.ready_at <= self.unit.clock.now and self.data is not PENDING)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = np.asarray(read(self), dtype=dtype)
        return array.copy() if copy else array

    def __repr__(self) -> str:
        spec = f"{self.spec.dtype}[{','.join(map(str, self.spec.shape))}]"
        if self.unit is None:
            return f"<SimValue {spec} donated>"
        state = f"ready at {self.ready_at:.9g} s" if self.error is None else f"failed: {self.error!r}"
        return f"<SimValue {spec} on {self.unit.device.name}, {state}>"


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any] | None:
    """The NumPy dtype of that name, those of ml_dtypes included; None for other types, such as PRNG keys."""
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return None


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype)  # slow in NumPy


def spec_of(value: Any) -> Spec:
    """Shape, dtype and size of an array of the host."""
    return Spec(tuple(value.shape), _dtype_name(value.dtype), getattr(value, "nbytes", 0))


def frozen(value: Any) -> Any:
    """The array, read-only if it is NumPy's: an op that writes into its operand fails instead of harming others."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        value = value.view()
        value.flags.writeable = False
    return value


def read(value: SimValue) -> Any:
    """The array of a value; zeros where none was computed.

    Raises:
        TensorError: its memory was donated, or it is not there yet.
        Exception: what it failed with.
    """
    unit = value.unit
    if unit is None:
        raise TensorError(f"{value!r} cannot be read: a launch took its memory; keep the launch's result instead")
    if not value.is_ready():
        raise TensorError(f"{value!r} is not there yet, at {unit.clock.now:.9g} s: await it, or `synchronize()`, first")
    if value.error is not None:
        raise value.error
    if value.data is not None:
        return value.data
    dtype = numpy_dtype(value.spec.dtype)
    if dtype is None:
        raise TensorError(f"{value!r} has no NumPy form; give the cluster compute=True to read the value itself")
    return np.zeros(value.spec.shape, dtype)


def arrive(source: Any, value: SimValue) -> None:
    """Complete a copy: read its source, a value of another device or an array of the host, as it is now."""
    if not isinstance(source, SimValue):
        value.data = frozen(source.copy() if isinstance(source, np.ndarray) else source)
        return
    value.error = source.error
    value.data = source.data
    if source.data is PENDING:
        value.data, value.error = None, _lost(source)


def _first_error(values: Sequence[SimValue]) -> BaseException | None:
    """Of the values that have failed, or are lost; an error may be false."""
    for value in values:
        if value.error is not None:
            return value.error
        if value.data is PENDING:
            return _lost(value)
    return None


def overlay(old: SimValue, new: SimValue, made: SimValue, join: Callable[[Any, Any], Any]) -> None:
    """Complete a write of a part: join the two, or pass on the first error."""
    made.error = _first_error((old, new))
    made.data = None if made.error is not None else frozen(join(old.data, new.data))


def evaluate(program: Program, args: Sequence[SimValue], results: Sequence[SimValue]) -> None:
    """Complete a launch: compute its nodes from the data of its arguments, or pass on the first error."""
    error = _first_error(args)
    env = {tensor.id: arg.data for tensor, arg in zip(program.inputs, args, strict=True)}
    if error is None:
        try:
            for node in program.nodes:
                _compute(node, env)
            for i, tensor in enumerate(program.outputs):
                results[i].data = _checked(env[tensor.id], tensor)
            if not program.outputs:
                results[0].data = np.True_
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            error = raised
    if error is not None:
        _fail(results, error)
    # The traceback of an error keeps this frame, which must keep neither the values nor the error itself.
    env.clear()
    del args, results, error


def _compute(node: Node, env: dict[int, Any]) -> None:
    made = node.fn(*[env[i] for i in node.inputs])
    if len(made) != len(node.outputs):
        raise TensorError(f"{node.name} returned {len(made)} values, expected {len(node.outputs)}")
    env.update(zip(node.outputs, made, strict=True))


def _fail(results: Sequence[SimValue], error: BaseException) -> None:
    for result in results:
        result.data, result.error = None, error


def _checked(data: Any, tensor: Tensor) -> Any:
    data = frozen(data)
    if tuple(data.shape) != tensor.shape or _dtype_name(data.dtype) != tensor.dtype:
        got = f"{data.dtype}[{','.join(map(str, data.shape))}]"
        raise TensorError(f"computing {tensor.describe()} gave {got}: the node's fn does not fit its outputs")
    return data


def _lost(value: SimValue) -> BaseException:
    return BackendLostError(f"{value!r} was never computed: the event loop that its cluster ran on has ended")
