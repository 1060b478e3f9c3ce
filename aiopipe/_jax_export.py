"""Programs and values as bytes and NumPy arrays, for a process on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from ._jax import aval_of, config_context, host_view
from ._jax_compile import calls_back, function_of
from ._jax_types import dtype_name, dtype_of, nbytes_of
from .devices.base import Program
from .errors import PlacementError
from .graph import Kind, Node, Tensor

__all__ = [
    "Bits",
    "Shipped",
    "bare",
    "describe",
    "export_program",
    "import_program",
    "is_array",
    "is_intact",
    "keep_to",
    "pack",
    "unpack",
    "wait_for",
]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A program that can travel: what `jax.export` makes of it, and how to compile it.

    Attributes:
        name: shows in profiles.
        code: StableHLO, as `jax.export` serializes it.
        inputs: (shape, name of the element type) of each input.
        outputs: the same of each output.
        donate: positions of the inputs whose memory the outputs may take over.
        config: JAX settings to compile under.
    """

    name: str
    code: bytes = field(repr=False)
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    outputs: tuple[tuple[tuple[int, ...], str], ...]
    donate: tuple[int, ...]
    config: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Bits:
    """A typed PRNG key as bits, which NumPy can hold."""

    data: np.ndarray[Any, Any]
    dtype: str


def bare(tensor: Tensor) -> Tensor:
    """A tensor without what cannot travel: its source and its buffers."""
    return _tensor(-1, tensor.name, tensor.shape, tensor.dtype)


def _tensor(number: int, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    return Tensor(number, name, shape, dtype, Kind.INPUT, nbytes_of(shape, dtype))


def keep_to(platform: str) -> None:
    """Have JAX start no other platform in this process, unless it has started: a GPU's memory is somebody else's."""
    jax.config.update("jax_platforms", platform)  # type: ignore[no-untyped-call]


def describe(platform: str) -> tuple[str, str]:
    """The platform to export for, as `jax.export` names it (it tells kinds of GPU apart), and the version of JAX.

    Args:
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    """
    device = jax.local_devices(backend=platform)[0]
    if device.platform != "gpu":
        return str(device.platform), jax.__version__
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda", jax.__version__


def export_program(program: Program, platform: str, name: str) -> Shipped:
    """A program as bytes. Blocks; needs no device of that platform.

    Args:
        program: what to export.
        platform: what for; see `describe`.
        name: of the backend, for messages.

    Raises:
        PlacementError: JAX cannot export it: it calls back into Python, say.
    """
    guilty = next((node for node in program.nodes if calls_back(node)), None)
    if guilty is not None:
        raise PlacementError(
            f"{name} cannot run {guilty.name} ({guilty.source or 'no source line'}): it calls back into Python, to a "
            "function of this process; place it on a device of this machine"
        )
    # The device says where a value is; the settings, how to compute.
    config = tuple((key, value) for key, value in program.config or () if key != "default_device")
    try:
        with config_context(config):
            exported = export.export(jax.jit(function_of(program)), platforms=[platform])(
                *(aval_of(tensor) for tensor in program.inputs)
            )
            code = bytes(exported.serialize())
    except ImportError as error:
        raise PlacementError(f"{name} needs the extra of aiopipe: pip install 'aiopipe[ray]' ({error})") from error
    except (NotImplementedError, ValueError) as error:
        ops = ", ".join(dict.fromkeys(node.op for node in program.nodes))
        raise PlacementError(
            f"{name} cannot run {program.name!r} (its operations: {ops}): JAX cannot export it for {platform!r} "
            f"({error}); place them on a device of this machine"
        ) from error
    return Shipped(program.name, code, _types(program.inputs), _types(program.outputs), program.donate, config)


def _types(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


class _Exported:
    """An exported function as the operation of a node."""

    def __init__(self, exported: export.Exported) -> None:
        self._call: Any = exported.call

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        outputs: Sequence[Any] = self._call(*inputs)
        return outputs

    def signature(self) -> int:
        """Equal to nothing else."""
        return id(self)


def import_program(shipped: Shipped) -> Program:
    """What was exported as a program of one node, which any backend of XLA can compile.

    Raises:
        ValueError: it was exported by a version of JAX that this one does not read.
    """
    types = (*shipped.inputs, *shipped.outputs)
    tensors = tuple(_tensor(i, f"value {i}", *kind) for i, kind in enumerate(types))
    inputs, outputs = tensors[: len(shipped.inputs)], tensors[len(shipped.inputs) :]
    call = _Exported(export.deserialize(bytearray(shipped.code)))
    node = Node(0, "exported", tuple(t.id for t in inputs), tuple(t.id for t in outputs), call)
    return Program(shipped.name, (node,), inputs, outputs, shipped.donate, shipped.config)


def is_array(value: Any) -> bool:
    """Whether it is an array, of JAX or NumPy."""
    return isinstance(value, jax.Array | np.ndarray)


def is_intact(value: Any) -> bool:
    """Whether it is an array of JAX that has not been deleted, so immutable."""
    return isinstance(value, jax.Array) and not value.is_deleted()


def wait_for(value: Any) -> None:
    """Wait for an array of this process; raises what it failed with."""
    if isinstance(value, jax.Array):
        value.block_until_ready()


def pack(value: Any) -> Any:
    """A value of this process as NumPy, or `Bits`. Blocks until it is ready."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return Bits(host_view(value), dtype_name(value.dtype))
    return host_view(value)


def unpack(value: Any) -> Any:
    """What was packed: a NumPy array, or typed PRNG keys."""
    if not isinstance(value, Bits):
        return value
    dtype_of(value.dtype)  # an unknown one is an error
    return jax.random.wrap_key_data(jnp.asarray(value.data), impl=key_impl(value.dtype))


def key_impl(dtype: str) -> str:
    """The implementation of a key type, by the type's name: ``"key<fry>"`` is JAX's ``"threefry2x32"``."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if dtype_name(jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype) == dtype:
            return impl
    raise TypeError(f"keys of type {dtype!r} cannot travel: expected one of JAX's own")
