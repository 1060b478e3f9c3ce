"""What tracing knows of states: the types of their arrays, before and after an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ._arguments import path_name
from ._jax_types import dtype_name, spec_of
from .errors import TraceError
from .graph import Tensor

__all__ = ["HasSpecs", "check_new_state", "named_leaves", "state_specs"]


class HasSpecs:
    """Something that stands for a pytree of arrays.

    Attributes:
        specs: the pytree as `jax.ShapeDtypeStruct`s.
    """

    specs: Any


def named_leaves(values: Any) -> tuple[tuple[str, ...], list[Any], Any]:
    """Names, leaves and structure of a pytree of arrays and `Tensor`s."""
    named, treedef = jax.tree_util.tree_flatten_with_path(values, is_leaf=lambda x: isinstance(x, Tensor))
    return tuple(path_name(path) or "state" for path, _ in named), [leaf for _, leaf in named], treedef


def state_specs(values: Any) -> Any:
    """The arrays of a state, or of a pytree that shows one, as `jax.ShapeDtypeStruct`s.

    Raises:
        TensorError: a leaf is nothing that JAX computes with.
    """
    if isinstance(values, HasSpecs):
        return values.specs
    names, leaves, treedef = named_leaves(values)
    specs = [spec_of(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    # Without weak types, which would change from one evaluation to the next.
    strong = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in specs]  # type: ignore[no-untyped-call]
    return jax.tree.unflatten(treedef, strong)


def check_new_state(name: str, result: Any, tree: Any, specs: Sequence[Any]) -> None:
    """Refuse a function with a state that does not return outputs and a new state of the same types.

    Args:
        name: of the function.
        result: what it returns, with `jax.ShapeDtypeStruct`s for arrays.
        tree: the structure of the state.
        specs: its arrays.

    Raises:
        TraceError: names the first array that differs.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise TraceError(
            f"{name!r} was traced with a state but returns {type(result).__name__}, "
            "expected a tuple of two: (outputs, new_state)"
        )
    found = jax.tree.structure(result[1])
    if found != tree:
        raise TraceError(f"{name!r} returns a new state of structure {found}, expected that of its state, {tree}")
    paths = jax.tree_util.tree_flatten_with_path(result[1])[0]
    for (path, new), spec in zip(paths, specs, strict=True):
        if (tuple(new.shape), dtype_name(new.dtype)) != (tuple(spec.shape), dtype_name(spec.dtype)):
            raise TraceError(
                f"{name!r} returns state {path_name(path) or 'state'!r} as {dtype_name(new.dtype)}{list(new.shape)}, "
                f"expected {dtype_name(spec.dtype)}{list(spec.shape)}: it has to keep its shape and type"
            )
