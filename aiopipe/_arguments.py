"""Arguments of a traced function: their names, and how a call's become the inputs of its graph.

Checking a call is on the way of every evaluation, so a call that fits is let through by a few
comparisons; only one that does not is looked at closely, to convert it or to say what is wrong.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._jax_types import canonical_dtype, dtype_name, is_scalar
from .errors import TensorError
from .graph import Tensor
from .handle import Handle

__all__ = [
    "Leaf",
    "convert_numbers",
    "flattener",
    "input_names",
    "numbers",
    "parameter_names",
    "path_name",
    "unflattener",
]


class Leaf(NamedTuple):
    """What an input must be.

    Attributes:
        name: of its tensor.
        shape: dimensions.
        dtype: element type, as arrays have it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any

    def error(self, got: str, hint: str) -> TensorError:
        """The value that was given for it does not fit."""
        return TensorError(f"input {self.name!r} got {got}, expected {_type(self.dtype, self.shape)}: {hint}")


def path_name(path: Iterable[Any]) -> str:
    """A pytree path as names have it, e.g. ``"layers/3/w"``."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def parameter_names(fn: Callable[..., Any], n_inputs: int, *, before: int = 1) -> list[str]:
    """Names of the parameters that take the inputs (behind `before` others); their positions where they have none."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # some callables show no signature
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][before:]
    return [named[i] if i < len(named) else str(i) for i in range(n_inputs)]


def input_names(parameters: Sequence[str], inputs: Sequence[Any]) -> list[str]:
    """A name for each leaf of the inputs, e.g. ``"x"`` or ``"batch/ids"``."""
    names = []
    for i, value in enumerate(inputs):
        base = parameters[i] if i < len(parameters) else str(i)
        for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]:
            names.append(f"{base}/{path_name(path)}" if path else base)
    return names


def flattener(
    name: str, parameters: Sequence[str], leaves: Sequence[Leaf], tree: Any
) -> Callable[[tuple[Any, ...]], Sequence[Any]]:
    """`Graph.flatten_inputs` for a function whose arguments have that tree and those leaves."""
    wanted = [(leaf.shape, leaf.dtype) for leaf in leaves]
    n_leaves = len(wanted)
    # Without containers there is nothing to flatten, which is most of what a check costs.
    is_plain = tree == jax.tree_util.tree_structure(tuple(range(len(parameters))))

    def fits(values: Sequence[Any]) -> bool:
        for x, (shape, dtype) in zip(values, wanted, strict=True):
            if type(x) is np.ndarray:
                if x.shape != shape or x.dtype != dtype:
                    return False
            elif not isinstance(x, jax.Array) or x.shape != shape or x.dtype != dtype or isinstance(x, jax.core.Tracer):
                return False
            elif x.is_deleted():
                return False
        return True

    def flatten_plain(args: tuple[Any, ...]) -> Sequence[Any]:
        if len(args) == n_leaves and fits(args):
            return args
        return _convert(name, parameters, leaves, tree, args)

    def flatten(args: tuple[Any, ...]) -> Sequence[Any]:
        values, found = jax.tree_util.tree_flatten(args)
        if found == tree and fits(values):
            return values
        return _convert(name, parameters, leaves, tree, args)

    return flatten_plain if is_plain else flatten


def unflattener(tree: Any) -> Callable[[Sequence[Any]], Any]:
    """`Graph.unflatten_outputs` for a function whose result has that tree."""
    if tree == jax.tree_util.tree_structure(0):
        return operator.itemgetter(0)
    return lambda values: jax.tree_util.tree_unflatten(tree, values)


def _convert(name: str, parameters: Sequence[str], leaves: Sequence[Leaf], tree: Any, args: Sequence[Any]) -> list[Any]:
    if len(args) != len(parameters):
        raise TensorError(
            f"graph {name!r} got {len(args)} arguments, expected {len(parameters)} ({', '.join(parameters)}): "
            "give those that come after the weights"
        )
    try:
        values = tree.flatten_up_to(tuple(args))  # lists stay where an array is expected
    except (ValueError, TypeError, KeyError) as error:
        raise _tree_error(name, parameters, leaves, tree, args) from error
    return [_convert_leaf(x, leaf) for x, leaf in zip(values, leaves, strict=True)]


def _tree_error(
    name: str, parameters: Sequence[str], leaves: Sequence[Leaf], tree: Any, args: Sequence[Any]
) -> TensorError:
    got, expected = input_names(parameters, args), [leaf.name for leaf in leaves]
    extra = [n for n in got if n not in expected]
    missing = [n for n in expected if n not in got]
    if extra or missing:
        what = f"got {_list(extra) or 'nothing'} in place of {_list(missing) or 'nothing'}"
    else:
        what = f"got {jax.tree_util.tree_structure(tuple(args))}, expected {tree}"
    return TensorError(
        f"arguments of graph {name!r} have another structure than it was traced with: {what}: "
        "trace again for this structure, or use a Pipeline, which does so by itself"
    )


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return f"{shown}, …" if len(names) > 5 else shown


def _type(dtype: Any, shape: Sequence[int]) -> str:
    return f"{_name(dtype)}[{','.join(map(str, shape))}]"


def _name(dtype: Any) -> str:
    try:
        return dtype_name(dtype)
    except TypeError:
        return str(dtype)


def _convert_leaf(x: Any, leaf: Leaf) -> Any:
    """The value as an array of the leaf's type, or `TensorError`."""
    if isinstance(x, (jax.ShapeDtypeStruct, Tensor)) or x is None:
        raise leaf.error("None" if x is None else f"a {type(x).__name__}, which has no value", "give an array")
    if isinstance(x, jax.core.Tracer):
        raise leaf.error("a tracer of a jax transformation", "evaluate a graph outside jit and grad")
    if is_scalar(x) or isinstance(x, (list, tuple)):
        return convert_numbers(x, leaf)
    if isinstance(x, jax.Array):
        if x.is_deleted():
            raise leaf.error(f"a deleted {_type(x.dtype, x.shape)}", "it was donated to a jitted function or deleted")
        array: Any = x
    elif isinstance(x, Handle):  # whose elements are far away
        array = x
    else:
        array = jnp.asarray(x) if hasattr(x, "__jax_array__") else np.asarray(x)
    shape, dtype = array.shape, array.dtype
    if dtype != leaf.dtype and isinstance(array, np.ndarray) and _canonical(dtype) == dtype_name(leaf.dtype):
        array = array.astype(leaf.dtype)  # as JAX itself would, e.g. float64 while 64 bit types are off
        dtype = array.dtype
    if dtype != leaf.dtype:
        hint = f"convert it, or {_retrace('dtype')}"
        raise leaf.error(_type(dtype, shape), hint if shape == leaf.shape else f"convert it, and {_retrace('shape')}")
    if shape != leaf.shape:
        raise leaf.error(_type(dtype, shape), _retrace("shape"))
    return array


def convert_numbers(x: Any, leaf: Leaf) -> Any:
    """Python numbers take the type of the leaf, as long as they are of its kind or a narrower one, and fit.

    Raises:
        TensorError: they do not, or have another shape.
    """
    what = f"the {type(x).__name__} {x!r}" if is_scalar(x) else f"a {type(x).__name__}"
    try:
        array = numbers(x, leaf.dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise leaf.error(f"{what} that is no array of that type", str(error)) from error
    if array.shape != leaf.shape:
        raise leaf.error(f"{what} of shape {array.shape}", _retrace("shape"))
    return array


def numbers(x: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """Python numbers as a new array of an element type.

    Raises:
        TypeError: they are of another kind, or of a wider one.
        OverflowError: an integer has no place in the type. NumPy would let its upper bits go.
        ValueError: they are no array.
    """
    array = np.asarray(x)
    rank, wanted = _rank(array.dtype), _rank(dtype)
    if rank is None or wanted is None or rank > wanted or (rank == 0) != (wanted == 0):
        raise TypeError(f"{array.dtype} numbers are not converted to {_name(dtype)}")
    if rank == wanted == _INTEGER:
        info: Any = jnp.iinfo  # untyped in some versions of JAX
        bounds = info(dtype)
        outside = array[(array < bounds.min) | (array > bounds.max)]
        if outside.size:
            raise OverflowError(f"{outside[0]} is not between {bounds.min} and {bounds.max}")
    return np.array(x, dtype)


_KINDS = (np.bool_, np.integer, np.floating, np.complexfloating)
_INTEGER = _KINDS.index(np.integer)


def _rank(dtype: Any) -> int | None:
    return next((i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind)), None)


def _canonical(dtype: Any) -> str | None:
    try:
        return canonical_dtype(dtype)
    except TypeError:
        return None


def _retrace(what: str) -> str:
    return f"trace again for this {what}, or use a Pipeline, which does so by itself"
