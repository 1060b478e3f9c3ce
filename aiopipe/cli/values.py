"""What a function gets: shapes that are typed, trees of them, or what a module has."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax_types
from .outcome import FunctionFailed, UsageError, users_line
from .target import Target

__all__ = ["arrays_like", "inputs_of", "specs_like", "state_of", "weights_of"]

_PLAIN = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")  # 8x128:float32
_AS_PRINTED = re.compile(r"(\w+)\[([\d,\s]*)\]")  # float32[8,128]
_SHORT = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "i32": "int32", "i8": "int8"}
_CONVENTIONAL = ("params", "weights")


def shape_of(text: str, option: str) -> jax.ShapeDtypeStruct | None:
    """What ``8x128:float32`` or ``float32[8,128]`` means; None for anything else.

    Raises:
        UsageError: it is such a text, but there is no such element type.
    """
    plain, printed = _PLAIN.fullmatch(text), _AS_PRINTED.fullmatch(text)
    if plain:
        shape, dtype = tuple(map(int, plain[1].split("x"))), plain[2] or "float32"
    elif printed:
        shape, dtype = tuple(int(part) for part in printed[2].split(",") if part.strip()), printed[1]
    else:
        return None
    try:
        known = _jax_types.canonical_dtype(np.dtype(_SHORT.get(dtype, dtype)))  # float32 for float64, where JAX says so
    except TypeError:
        raise UsageError(f"{option}: got the element type {dtype!r}, expected one such as float32 or int8") from None
    return _jax_types.struct(shape, _jax_types.dtype_of(known))


def value_of(text: str, option: str, target: Target, call: Callable[[Callable[[], Any]], Any]) -> Any:
    """A shape, a JSON tree of shapes, or what a module has under a name.

    Args:
        text: what was typed.
        option: behind which option.
        target: the user's function; names without a module are looked up beside it.
        call: what to do with a function that makes the value.
    """
    text = text.strip()
    if text[:1] in ("{", "[", '"') or text == "null":
        return _tree(text, option)
    shape = shape_of(text, option)
    if shape is not None:
        return shape
    if not re.fullmatch(r"[\w./\\-]*:?[A-Za-z_][\w.]*", text):
        raise UsageError(
            f"{option}: got {text!r}, expected a shape such as 8x128:float32, a JSON tree of shapes, or the name of "
            "something in the module"
        )
    found = target.beside(text, option)
    return call(found) if callable(found) else found


def _tree(text: str, option: str) -> Any:
    def read(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: read(child) for name, child in node.items()}
        if isinstance(node, list):
            return [read(child) for child in node]
        if node is None:
            return None
        found = shape_of(node, option) if isinstance(node, str) else None
        if found is None:
            raise UsageError(f'{option}: got {node!r} in a tree, expected a shape such as "8x128:float32"')
        return found

    try:
        return read(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"{option}: {text!r} is no JSON: {error}") from None


def weights_of(text: str | None, target: Target, *, real: bool) -> Any:
    """The function's weights.

    Args:
        text: what was typed; by default what the module has as ``params`` or ``weights``.
        target: the user's function.
        real: arrays are needed, not only their shapes.
    """
    if text is None:
        text = next((name for name in _CONVENTIONAL if target.has(name)), None)
        if text is None:
            raise UsageError(
                f"{target.module} has neither 'params' nor 'weights': say what the function takes first, by --weights "
                "NAME of what is in the module (an array, a tree of them, or a function that makes one), or by shapes, "
                "such as --weights '[\"64x64\"]', or --weights null for nothing"
            )
    found = value_of(text, "--weights", target, _called if real else _shapes)
    return arrays_like(found) if real else found


def inputs_of(texts: Sequence[str], target: Target, *, real: bool) -> list[Any]:
    """What the function takes behind its weights (and its state)."""
    found = [value_of(text, "--input", target, _called) for text in texts]
    made: list[Any] = arrays_like(found) if real else specs_like(found)
    return made


def state_of(text: str | None, target: Target) -> Any:
    """The shapes of the function's state, or None."""
    return None if text is None else specs_like(value_of(text, "--state", target, _shapes))


def _called(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        name = getattr(make, "__name__", type(make).__name__)
        raise FunctionFailed(f"{name}() raised {type(error).__name__} at {users_line(error)}: {error}") from error


def _shapes(make: Callable[[], Any]) -> Any:
    """What a function returns, in shapes: nothing is computed where JAX can tell without."""
    try:
        return jax.eval_shape(make)
    except Exception:  # it looks at values, or returns what is no array
        return _called(make)


def specs_like(tree: Any) -> Any:
    """Shapes and types of a tree's arrays."""
    return jax.tree.map(_jax_types.spec_of, tree)


def arrays_like(tree: Any) -> Any:
    """The same tree with arrays where it has shapes: random floats, zeros for integers."""
    rng = np.random.default_rng(0)

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            fan_in = leaf.shape[0] if len(leaf.shape) > 1 else 1
            return (rng.standard_normal(leaf.shape, np.float32) / fan_in**0.5).astype(leaf.dtype)
        return np.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(array, tree)
