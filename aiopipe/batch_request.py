"""A call of a `Batcher`: its inputs checked and brought to the host, and its result put together again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _jax, _jax_types
from ._arguments import path_name
from ._threads import in_thread
from .batching import Array, Sizes
from .errors import TensorError
from .fetch import fetch
from .handle import Handle

__all__ = ["INLINE_NBYTES", "Call", "Request", "Template", "read_call", "to_host"]

Name = Callable[[int], str]
"""The name of the i-th input."""

INLINE_NBYTES = 1 << 19
"""Up to this size arrays are copied on the event loop: it takes less than handing them over."""


class Call(NamedTuple):
    """What a call gave.

    Attributes:
        kind: calls of an equal kind can share a batch.
        leaves: the arrays, (n_rows, ...).
        structure: of the inputs.
        n_rows: length of axis 0 of all of them.
        n_tokens: length of axis 1; 0 where that is not padded.
        single: whether the axis of rows was added, and is to be taken off the result.
    """

    kind: Hashable
    leaves: Sequence[Array]
    structure: Any
    n_rows: int
    n_tokens: int
    single: bool


class Request:
    """A call whose result is awaited.

    Attributes:
        call: its inputs.
        cuts: the first row and the end of each of its parts.
        result: what the caller awaits.
    """

    __slots__ = ("_n_left", "_rows", "call", "cuts", "result")

    def __init__(self, call: Call, cuts: Sequence[tuple[int, int]], loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.cuts = cuts
        self.result: asyncio.Future[Any] = loop.create_future()
        self._n_left = len(cuts)
        self._rows: list[list[Array]] = [[]] * len(cuts)

    def arrays(self, part: int) -> list[Array]:
        """The inputs of a part."""
        start, stop = self.cuts[part]
        return [leaf[start:stop] for leaf in self.call.leaves]

    def succeed(self, part: int, rows: list[Array], structure: Any) -> bool:
        """The results of a part are there; whether they were the last ones.

        What goes wrong as they are put together is this call's alone.
        """
        self._rows[part] = rows
        self._n_left -= 1
        if self._n_left:
            return False
        try:
            whole = rows if len(self._rows) == 1 else [np.concatenate(parts) for parts in zip(*self._rows, strict=True)]
            if self.call.single:
                whole = [array[0] for array in whole]
            result = jax.tree.unflatten(structure, whole)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the user's own pytree node may raise
            self.fail(error)
        else:
            if not self.result.done():
                self.result.set_result(result)
        return True

    def fail(self, error: BaseException) -> None:
        """It will have no result."""
        if self.result.done():
            return
        if isinstance(error, StopIteration):  # no future takes one
            failure = RuntimeError("the result could not be put together: StopIteration was raised")
            failure.__cause__ = error
            error = failure
        self.result.set_exception(error)

    def leave(self) -> None:
        """Nobody awaits the result any more."""
        if not self.result.cancel() and not self.result.cancelled():
            self.result.exception()  # it has been seen


class Template:
    """What every call has to look like, but for the number of rows (and the length).

    Args:
        like: the inputs of a call: arrays or `jax.ShapeDtypeStruct`, with an axis of rows; a tuple or a list of them,
            or the only one.
        ragged: whether axis 1 may have any length.
    """

    def __init__(self, like: Any, ragged: bool) -> None:
        self._ragged = ragged
        inputs = tuple(like) if isinstance(like, (tuple, list)) else (like,)
        specs, self.structure = jax.tree.flatten(inputs)
        self._specs = [_jax_types.spec_of(spec, "like") for spec in specs]
        self._wanted = [_type(spec, ragged) for spec in self._specs]

    def at(self, n_rows: int, length: int) -> Any:
        """The inputs of a batch, as `jax.ShapeDtypeStruct`."""

        def resized(spec: Any) -> Any:
            rest = spec.shape[1:]
            if length and rest:
                rest = (length, *rest[1:])
            return _jax_types.struct((n_rows, *rest), spec.dtype)

        return jax.tree.unflatten(self.structure, [resized(spec) for spec in self._specs])

    def check(self, name: Name, leaves: Sequence[Array], structure: Any) -> None:
        """Raise `TensorError` for a call that does not look so."""
        if structure != self.structure:
            raise TensorError(f"got inputs of the structure {structure}, expected {self.structure}, as `like` has it")
        for i, (leaf, spec) in enumerate(zip(leaves, self._specs, strict=True)):
            if _type(leaf, self._ragged) != self._wanted[i]:
                sizes = ["rows", *map(str, spec.shape[1:])]
                if self._ragged and len(sizes) > 1:
                    sizes[1] = "length"
                expected = f"{_jax_types.dtype_name(spec.dtype)}[{','.join(sizes)}]"
                got = f"{_jax_types.dtype_name(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"
                raise TensorError(f"input {name(i)!r} is {got}, expected {expected}, as `like` has it")


async def read_call(inputs: tuple[Any, ...], sizes: Sizes, pad: Any, template: Template | None, single: bool) -> Call:
    """Check the inputs of a call, and bring them to the host.

    Args:
        inputs: pytrees of arrays.
        sizes: what batches are padded to.
        pad: what axis 1 is padded with.
        template: what the call has to look like.
        single: whether the axis of rows is to be added.

    Raises:
        TensorError: they are no arrays, have different numbers of rows or none, or are not as the template has it.
    """
    leaves, structure = jax.tree.flatten(inputs)

    def name(i: int) -> str:
        return path_name(jax.tree_util.tree_flatten_with_path(inputs)[0][i][0])

    for leaf in leaves:
        if type(leaf) is not np.ndarray or leaf.dtype not in _jax_types.PLAIN_DTYPES:
            for i, value in enumerate(leaves):
                _check_type(name(i), value, single)
            leaves = [_canonical(value) for value in await to_host(leaves)]
            break
    if single:
        leaves = [leaf[None] for leaf in leaves]
    n_rows = _n_rows(name, leaves)
    ragged = bool(sizes.lengths)
    if template is not None:
        template.check(name, leaves, structure)
        kind: Hashable = 0  # there is only one
    else:
        kind = (structure, *(_type(leaf, ragged) for leaf in leaves))
    n_tokens = 0
    if ragged:
        n_tokens = _n_tokens(name, leaves, sizes)
        for i, leaf in enumerate(leaves):
            _check_pad(name, i, leaf, pad)
    return Call(kind, leaves, structure, n_rows, n_tokens, single)


async def to_host(values: Sequence[Any]) -> list[Array]:
    """Arrays of this process's memory with these values; off the event loop where that takes long, or waits."""
    if any(isinstance(value, Handle) for value in values):
        values = await fetch(list(values))
    if all(_is_here(value) for value in values):
        return [np.asarray(value) for value in values]
    return await in_thread(lambda: [np.asarray(value) for value in values], "fetch")


def _is_here(value: Any) -> bool:
    """Whether it can be read without waiting, and without copying."""
    if isinstance(value, jax.Array):
        return _jax.is_ready(value) and all(device.platform == "cpu" for device in value.devices())
    return isinstance(value, np.ndarray | np.generic) or _jax_types.is_scalar(value)


def _check_type(name: str, leaf: Any, single: bool) -> None:
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise TensorError(f"input {name!r} is a deleted array: it was donated to a jitted function or deleted")
    spec = _jax_types.spec_of(leaf, name)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TensorError(f"input {name!r} is a jax.ShapeDtypeStruct, which has no value: give an array")
    if jnp.issubdtype(spec.dtype, jax.dtypes.extended):
        raise TensorError(f"input {name!r} is a typed PRNG key, which cannot be merged: give jax.random.key_data of it")
    if not hasattr(leaf, "shape") and not single:
        kind = type(leaf).__name__
        raise TensorError(f"input {name!r} is the {kind} {leaf!r}, expected an array with an axis of rows")


def _n_rows(name: Name, leaves: Sequence[Array]) -> int:
    if not leaves:
        raise TensorError("got no arrays: there is nothing to merge")
    for i, leaf in enumerate(leaves):
        if leaf.ndim == 0:
            raise TensorError(
                f"input {name(i)!r} has no axes, expected one of rows in front: use `single` for one item without it"
            )
        if len(leaf) != len(leaves[0]):
            raise TensorError(
                f"input {name(i)!r} has {len(leaf)} rows, but {name(0)!r} has {len(leaves[0])}: axis 0 is that of "
                "rows, and must have the same length in all inputs"
            )
    if len(leaves[0]) == 0:
        raise TensorError(f"input {name(0)!r} has no rows, expected at least one")
    return len(leaves[0])


def _n_tokens(name: Name, leaves: Sequence[Array], sizes: Sizes) -> int:
    found = {i: leaf.shape[1] for i, leaf in enumerate(leaves) if leaf.ndim > 1}
    if not found or len(set(found.values())) > 1 or min(found.values()) == 0:
        shown = ", ".join(f"{n} in {name(i)!r}" for i, n in found.items()) or "in none"
        raise TensorError(
            f"got inputs of the length {shown}: axis 1 is that of the length, and must be the same in all, at least 1"
        )
    n_tokens: int = found.popitem()[1]
    if n_tokens > sizes.lengths[-1]:
        raise TensorError(
            f"got inputs of the length {n_tokens} (axis 1), expected at most {sizes.lengths[-1]}: cut them, or give "
            "the batcher larger `lengths`"
        )
    return n_tokens


def _check_pad(name: Name, i: int, leaf: Array, pad: Any) -> None:
    try:
        np.array(pad, leaf.dtype)
    except (OverflowError, TypeError, ValueError) as error:
        kind = leaf.dtype.name
        raise TensorError(f"input {name(i)!r} is {kind}, which cannot be padded with {pad!r}: {error}") from error


def _canonical(leaf: Array) -> Array:
    """As JAX has it: float64 becomes float32 where 64 bit types are off."""
    return leaf.astype(_jax_types.dtype_of(_jax_types.canonical_dtype(leaf)), copy=False)


def _type(leaf: Any, ragged: bool) -> Hashable:
    """What has to be equal for two arrays to be merged."""
    return leaf.dtype, leaf.ndim, leaf.shape[2 if ragged else 1 :]
