"""`place`: put a pytree of weights on backends by the paths of its leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from . import _jax, _jax_types
from ._jax_settings import Settings
from ._threads import in_thread
from .backend import Backend
from .buffer import Buffer, held_value
from .devices.base import BufferUsage
from .errors import PlacementError
from .graph import Kind, Tensor

__all__ = ["Placement", "Target", "place", "place_under", "upload_weight"]

Target = Backend | Sequence[Backend]
Placement = Mapping[str, Target] | Callable[[str], Target]


async def place(tree: Any, placement: Placement) -> Any:
    """Put every array of a pytree on the backends that its path asks for.

    Args:
        tree: NumPy arrays, JAX arrays, scalars or PRNG keys. NumPy arrays are copied: changing one
            afterwards changes nothing.
        placement: globs over the path, e.g. ``{"layers/[0-5]/*": gpu, "*": cpu}``; the first that
            matches counts. Or a function from the path. Each gives a backend, or several
            for a weight that is to be replicated.

    Returns:
        The same tree with a `Tensor` for each array; give it to `trace` as the weights.

    Raises:
        PlacementError: no glob matches a path.
        AllocationError: a backend has no room.
    """
    return await place_under(_jax.config_snapshot(), tree, placement)


async def place_under(config: Settings, tree: Any, placement: Placement) -> Any:
    """`place` under JAX settings that were read before."""
    leaves, treedef = tree_flatten_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, Tensor))
    named = [(keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves]
    targets = [_targets(path, placement) for path, _ in named]

    def upload() -> list[Tensor]:
        with _jax.config_context(config):
            return [upload_weight(path, leaf, held) for (path, leaf), held in zip(named, targets, strict=True)]

    return jax.tree.unflatten(treedef, await in_thread(upload, "upload"))


def _targets(path: str, placement: Placement) -> tuple[Backend, ...]:
    if callable(placement):
        target: Target | None = placement(path)
        rule = "the placement function"
    else:
        rule = next((glob for glob in placement if fnmatchcase(path, glob)), "")
        target = placement[rule] if rule else None
        if target is None:
            raise PlacementError(
                f"no glob of the placement matches the weight {path!r}: have {list(placement)}; "
                f"add one for it, or '*' as the last one"
            )
    backends = (target,) if isinstance(target, Backend) else tuple(target or ())
    if not backends or not all(isinstance(backend, Backend) for backend in backends):
        raise PlacementError(f"{rule!r} gives {target!r} for the weight {path!r}: expected a backend, or several")
    return backends


def upload_weight(path: str, leaf: Any, backends: Sequence[Backend]) -> Tensor:
    """One weight on one or several backends. Blocks."""
    spec = _jax_types.spec_of(leaf, path)
    dtype = _jax_types.dtype_name(spec.dtype)
    tensor = Tensor(-1, path, tuple(spec.shape), dtype, Kind.WEIGHT, _jax_types.nbytes_of(spec.shape, dtype))
    value = held_value(leaf) if isinstance(leaf, Tensor) else leaf
    buffers = []
    for backend in backends:
        backend.check_open()
        held = next((b for b in leaf.buffers if b.backend is backend), None) if isinstance(leaf, Tensor) else None
        if held is None:
            backend.check_room(tensor.nbytes)
            with backend.asking_for(tensor):
                uploaded = backend.upload(value, tensor)
            held = Buffer(backend, backend.device.buffer_types()[0], BufferUsage.WEIGHTS, tensor.nbytes, uploaded)
        buffers.append(held)
    return replace(tensor, buffers=tuple(buffers))
