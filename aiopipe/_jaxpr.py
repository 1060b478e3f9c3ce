"""Jaxprs and their equations: what they compute, what identifies them, which effects they have.

Reads jaxprs by their attributes alone, so it is the same for every version of JAX.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._jax import source_context
from ._jax_settings import config_context, undisturbed
from ._jax_types import is_ref

__all__ = [
    "INLINED",
    "EffectKind",
    "Equation",
    "FlatJaxpr",
    "bind",
    "effect_kind",
    "freeze",
    "inner_jaxpr",
    "make_jaxpr",
    "nested_jaxprs",
    "open_jaxpr",
]


@dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """A traced function.

    Attributes:
        eqns: its equations, in order.
        invars: a variable for each argument.
        outvars: a variable or literal for each result.
        constvars: a variable for each array that the function closed over.
        consts: these arrays.
    """

    eqns: Sequence[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    constvars: Sequence[Any]
    consts: Sequence[Any]


def open_jaxpr(jaxpr: Any) -> FlatJaxpr:
    """The parts of a Jaxpr or ClosedJaxpr: two classes up to JAX 0.10, one after it."""
    consts = getattr(jaxpr, "consts", ())
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return FlatJaxpr(inner.eqns, inner.invars, inner.outvars, inner.constvars, consts)


def make_jaxpr(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[FlatJaxpr, Any]:
    """Trace ``fn(*args)``.

    Args:
        args: arrays, Python scalars or `jax.ShapeDtypeStruct`s, pytrees of them too. Their weak types
            count, so that ``3.0`` promotes as it does under `jax.jit`.

    Returns:
        The jaxpr, and the result as a pytree of `jax.ShapeDtypeStruct`s.
    """
    with config_context((("disable_jit", False),)):  # loops stay loops
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    return open_jaxpr(jaxpr), shapes


INLINED: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "eval_jaxpr": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
}
"""Primitives that only call a function, and the parameter that holds it. Their other parameters say how
to differentiate or batch the call, or how to compile it as a unit; here both are past or pointless."""


def inner_jaxpr(eqn: Any) -> FlatJaxpr | None:
    """The function that an equation of `INLINED` calls; None for any other equation."""
    param = INLINED.get(eqn.primitive.name)
    inner = None if param is None else eqn.params.get(param)
    return open_jaxpr(inner) if _is_jaxpr(inner) else None


def copy_equation(aval: Any) -> Any:
    """An equation that copies a value of that shape and type, so that the copy has memory of its own."""
    spec = jax.ShapeDtypeStruct(aval.shape, aval.dtype)  # type: ignore[no-untyped-call]
    flat, _ = make_jaxpr(lambda x: jnp.array(x, copy=True), [spec])
    (eqn,) = flat.eqns
    return eqn


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def nested_jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs directly inside the parameters of an equation."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if _is_jaxpr(item):
                yield item


# Calling ------------------------------------------------------------------------------------------


def bind(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Run an equation on values, eager or traced; always a sequence. What `jax.core.eval_jaxpr` does for each."""
    primitive = eqn.primitive
    params: Any = primitive.get_bind_params(eqn.params)
    functions: Sequence[Any] = ()
    if isinstance(params, tuple):  # pragma: no cover - JAX 0.8 keeps functions apart from the other parameters
        functions, params = params
    with source_context(eqn), eqn.ctx.manager:
        result = primitive.bind(*functions, *operands, **params)
    return result if primitive.multiple_results else (result,)


class Equation:
    """The `Op` of one equation.

    Args:
        eqn: the equation.
        slots: for each of its operands, the position among the node's inputs, or None for a literal.
        literals: the values of the literals, in order.
    """

    __slots__ = ("_primitives", "_signature", "eqn", "literals", "slots")

    def __init__(self, eqn: Any, slots: tuple[int | None, ...], literals: tuple[Any, ...] = ()) -> None:
        self.eqn = eqn
        self.slots = slots
        self.literals = literals
        self._signature: Hashable = None
        self._primitives: frozenset[str] | None = None

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        literals = iter(self.literals)
        return bind(self.eqn, [next(literals) if slot is None else inputs[slot] for slot in self.slots])

    def signature(self) -> Hashable:
        """Equal for equations that compute the same function of their inputs."""
        if self._signature is None:
            lifted = {id(c): i for i, c in enumerate(self._lifted)}
            literals = tuple(map(freeze, self.literals))
            self._signature = _Hashed((self.slots, literals, *_freeze_eqn(self.eqn, lifted), len(lifted)))
        return self._signature

    @property
    def _lifted(self) -> Sequence[Any]:
        return ()

    @property
    def primitives(self) -> frozenset[str]:
        """Names of the primitives in it, at any depth."""
        if self._primitives is None:
            self._primitives = frozenset(_primitives(self.eqn))
        return self._primitives

    def __repr__(self) -> str:
        return f"<Equation {self.eqn.primitive.name}>"


def _primitives(eqn: Any) -> Iterator[str]:
    yield eqn.primitive.name
    for inner in nested_jaxprs(eqn.params):
        for each in open_jaxpr(inner).eqns:
            yield from _primitives(each)


# Signatures ---------------------------------------------------------------------------------------

_LARGE_NBYTES = 1 << 16
_NONE: Mapping[int, int] = types.MappingProxyType({})


class _Hashed:
    """A deep tuple that hashes once."""

    __slots__ = ("hash", "key")

    def __init__(self, key: tuple[Any, ...]) -> None:
        self.key = key
        self.hash = hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Hashed) and self.hash == other.hash and self.key == other.key)

    def __repr__(self) -> str:
        return f"<signature {self.hash & 0xFFFFFFFF:08x}>"


class _Same:
    """Equal for the same object only; keeps it alive, so that its id stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def freeze(value: Any, lifted: Mapping[int, int] = _NONE) -> Hashable:
    """A hashable stand-in, equal only for values that mean the same as a parameter of a primitive.

    Containers by their items, jaxprs by structure, arrays by their bytes (large ones by identity),
    other values by their own equality where they have one. `lifted` numbers constants, by id, that
    are inputs.
    """
    kind = type(value)
    if value is None or kind in (int, str, bool, bytes):
        return (kind, value)  # the type: 1 == True == 1.0
    if kind in (float, complex):
        return (kind, repr(value))  # tells -0.0 from 0.0, and nan equals itself
    if isinstance(value, (tuple, list)):
        return (kind, *[freeze(v, lifted) for v in value])
    if isinstance(value, Mapping):
        return (kind, *sorted(((str(k), freeze(v, lifted)) for k, v in value.items()), key=lambda kv: kv[0]))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(freeze(v, lifted) for v in value))
    if _is_jaxpr(value):
        return _freeze_jaxpr(value, lifted)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return _freeze_array(value, lifted)
    if isinstance(value, (int, float, complex)) and not isinstance(value, enum.Enum):  # JAX's typed scalars
        return (kind, repr(value), str(getattr(value, "dtype", "")))
    if hasattr(value, "__array__") and isinstance(getattr(value, "dtype", None), np.dtype):  # JAX's typed literals
        return _freeze_array(np.asarray(value), lifted)
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (kind, value)


def _freeze_array(value: Any, lifted: Mapping[int, int]) -> Hashable:
    if id(value) in lifted:
        return ("lifted", lifted[id(value)])
    if isinstance(value, jax.core.Tracer) or (isinstance(value, jax.Array) and value.is_deleted()):
        return _Same(value)
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        with undisturbed():
            return (str(value.dtype), _freeze_array(jax.random.key_data(value), _NONE))
    if value.nbytes > _LARGE_NBYTES or value.dtype == object:
        return _Same(value)
    with undisturbed():
        data = np.asarray(value)
    return (str(data.dtype), data.shape, data.tobytes(), bool(getattr(value, "weak_type", False)))


def _freeze_eqn(eqn: Any, lifted: Mapping[int, int]) -> tuple[Hashable, ...]:
    inner = inner_jaxpr(eqn)
    if inner is not None:  # how to differentiate it, under what name to compile it: no part of its value
        return (eqn.primitive, _freeze_jaxpr(inner, lifted), eqn.ctx)
    params = eqn.params
    return (eqn.primitive, tuple([(k, freeze(params[k], lifted)) for k in sorted(params)]), eqn.ctx)


def _freeze_jaxpr(jaxpr: Any, lifted: Mapping[int, int]) -> Hashable:
    flat = jaxpr if isinstance(jaxpr, FlatJaxpr) else open_jaxpr(jaxpr)
    numbers: dict[Any, int] = {}

    def read(atom: Any) -> Hashable:
        if hasattr(atom, "val"):
            return (str(atom.aval), freeze(atom.val))
        return numbers[atom]

    def write(var: Any) -> Hashable:
        numbers[var] = len(numbers)
        return str(var.aval)

    head = (
        tuple([write(v) for v in (*flat.constvars, *flat.invars)]),
        tuple([freeze(c, lifted) for c in flat.consts]),
    )
    body = [
        (*_freeze_eqn(eqn, lifted), tuple([read(v) for v in eqn.invars]), tuple([write(v) for v in eqn.outvars]))
        for eqn in flat.eqns
    ]
    return ("jaxpr", head, tuple(body), tuple([read(v) for v in flat.outvars]))


# Effects ------------------------------------------------------------------------------------------


class EffectKind(enum.Enum):
    """What an equation does besides its outputs."""

    NONE = "none"
    UNORDERED = "unordered"
    ORDERED = "ordered"
    REF = "ref"


_REF_EFFECTS = frozenset({"ReadEffect", "WriteEffect", "AccumEffect", "RefEffect"})


def effect_kind(eqn: Any) -> EffectKind:
    """The strongest effect of an equation.

    A mutable reference that lives and dies inside a call, loop or branch is no effect of it.
    """
    names = {type(e).__name__ for e in eqn.effects}
    if any("Ordered" in name for name in names):
        return EffectKind.ORDERED
    if names & _REF_EFFECTS or any(is_ref(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return EffectKind.REF
    return EffectKind.UNORDERED if names - {"InternalMutableArrayEffect"} else EffectKind.NONE
