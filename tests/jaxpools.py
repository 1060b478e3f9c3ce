"""Functions of inputs, and steps of states, that a number decides: traced and compiled once however often they come.

Compiling is what costs time. So hypothesis draws a number, and everything else about an example anew.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import aiopipe as ap
from executables import jit
from jaxprograms import EXACT, JUMPING, KINDS, SMOOTH, Step, array_of, as_numpy, run, tolerance

N_EXAMPLES: int = settings.default.max_examples  # type: ignore[union-attr]
FIRST_PROGRAM = int(os.environ.get("AIOPIPE_FIRST_PROGRAM", 0))
"""Where the numbers begin: a long run can be done in parts, each of programs of its own, whose pieces stay compiled."""
N_PROGRAMS = max(24, min(100, N_EXAMPLES // 16), N_EXAMPLES // 100)
NUMBERS = st.integers(FIRST_PROGRAM, FIRST_PROGRAM + N_PROGRAMS - 1)
N_CUTS = N_ORDERS = 3

_OPS = [*SMOOTH, *EXACT, *JUMPING]


def _steps(rng: random.Random, n: int) -> list[Step]:
    return [Step(rng.choice(_OPS), *(rng.randint(0, 20) for _ in range(3))) for _ in range(n)]


def _cuts(rng: random.Random) -> list[tuple[int, ...]]:
    return [(), *(tuple(rng.choices(range(4), k=rng.randint(1, 6))) for _ in range(N_CUTS - 1))]


def cut(graph: ap.Graph, runs: Sequence[int], n_devices: int) -> list[int] | None:
    """A backend for each node: some nodes in a row, then some more."""
    n = len(graph.nodes)
    return [runs[i * len(runs) // n] % n_devices for i in range(n)] if runs and n else None


# Functions of inputs -----------------------------------------------------------------------------


class Function:
    """A function of one or two inputs and some weights.

    Attributes:
        cuts: ways to cut it; see `cut`.
        batches: inputs.
        tolerance: how far results may be off; see `jaxprograms`.
    """

    def __init__(self, number: int) -> None:
        rng = random.Random(number)
        self.number = number
        self.cuts = _cuts(rng)
        self._inputs = rng.choices(KINDS, k=rng.randint(1, 2))
        self._steps = _steps(rng, rng.randint(1, 7))
        self._outputs = [rng.randint(0, 20) for _ in range(rng.randint(0, 3))]
        self._nested = rng.random() < 0.5
        self._orders = [[rng.randint(0, 20) for _ in range(5)] for _ in range(N_ORDERS)]
        self.batches = [[array_of(kind, seed=10 * k + i) for i, kind in enumerate(self._inputs)] for k in range(6)]
        weights = [array_of(kind, seed=50 + i) for i, kind in enumerate(rng.choices(KINDS, k=rng.randint(0, 3)))]
        self.weights = [w if rng.random() < 0.7 else jax.device_put(w, rng.choice(jax.devices()[:4])) for w in weights]
        self.tolerance = tolerance(self._steps)

    def __repr__(self) -> str:
        return f"<Function {self.number} of {self._inputs}: {self._steps} -> {self._outputs}>"

    def args(self, batch: Sequence[Any]) -> list[Any]:
        """A batch as the function takes it."""
        return [{"none": None, "xs": batch}] if self._nested else list(batch)

    def params(self, weights: Sequence[Any]) -> Any:
        return {"w": weights, "none": None}

    def call(self, order: Sequence[int], params: Any, *args: Any) -> Any:
        xs = args[0]["xs"] if self._nested else args
        values = run(self._steps, [*xs, *params["w"]], order=order)
        picked = [values[o % len(values)] for o in self._outputs]
        return {"last": values[-1], "none": None, "picked": tuple(picked)}

    @property
    def _params_in_one_place(self) -> Any:
        return self.params([jax.device_put(w, jax.devices()[0]) for w in self.weights])

    @functools.cached_property
    def want(self) -> list[Any]:
        """What `jax.jit` makes of each batch."""
        oracle = jit(functools.partial(self.call, ()))
        params = self._params_in_one_place
        return [as_numpy(oracle(params, *self.args(batch))) for batch in self.batches]

    def one_by_one(self, k: int) -> Any:
        """What its operations make of a batch, each compiled by itself: says who is right where `want` is in doubt.

        XLA for CPUs (JAX 0.10.2) makes a wrong program of about one in a thousand functions when it has all of it at
        once: that of number 203, whose `dynamic_update_slice` is to replace one row, replaces two.
        """
        with jax.disable_jit():
            return as_numpy(self.call((), self._params_in_one_place, *self.args(self.batches[k])))

    def trace(self, order: int, weights: Sequence[Any]) -> ap.Graph:
        """Its operations in one of a few orders."""
        fn = functools.partial(self.call, self._orders[order])
        return ap.trace(fn, self.params(weights), *self.args(self.batches[0]))

    @functools.cache  # noqa: B019  # as long-lived as this is
    def traced(self, order: int) -> ap.Graph:
        """The same for its own weights."""
        return self.trace(order, self.weights)


function_of = functools.lru_cache(1000)(Function)
FUNCTIONS = NUMBERS.map(function_of)

# Steps of states ---------------------------------------------------------------------------------

LEAVES = {"a": "float32[2,3]", "b": "float32[2,3]", "n": "int32[]", "e": "float32[0,3]"}
BEGIN = {name: array_of(kind, seed=90) for name, kind in LEAVES.items()}
CHANGES = {
    "a": ("keep", "swap", "overwrite", "write", "write twice"),
    "b": ("keep", "swap", "overwrite", "write", "write twice"),
    "n": ("keep", "count", "overwrite"),
    "e": ("keep", "overwrite"),
}


def batch_of(k: int) -> Any:
    """What is given to a step."""
    return array_of("float32[2,3]", seed=k)


class Steps:
    """One or two functions that change one kind of state: its leaves, each in one of a few ways, and compute something.

    Attributes:
        weights: of each.
        cuts: ways to cut them; see `cut`.
        tolerance: how far values may be off.
        oracles: each by `jax.jit`: of the weights, a state and a batch.
    """

    def __init__(self, number: int) -> None:
        rng = random.Random(-1 - number)
        self.number = number
        self.cuts = _cuts(rng)
        self.weights = [array_of("float32[2,3]", seed=70 + i) for i in range(2)]
        self._changes = [{leaf: rng.choice(ways) for leaf, ways in CHANGES.items()} for _ in range(rng.randint(1, 2))]
        self._steps = _steps(rng, rng.randint(0, 4))
        self._outputs = [rng.randint(0, 20) for _ in range(rng.randint(0, 2))]
        self.models = [functools.partial(self._call, change) for change in self._changes]
        self.oracles = [jit(model) for model in self.models]
        self.tolerance = 5 * tolerance(self._steps)

    def __repr__(self) -> str:
        return f"<Steps {self.number} of {self._changes}: {self._steps} -> {self._outputs}>"

    def _call(self, change: dict[str, str], w: Any, state: Any, x: Any) -> Any:
        values = run(self._steps, [x, *w], [state["a"], state["b"], state["n"], state["e"]])
        new = dict(state)
        for name, other, weight in (("a", "b", w[0]), ("b", "a", w[1])):
            written = state[name].at[0].set(x[1] + weight[0])
            new[name] = {
                "keep": state[name],
                "swap": state[other],
                "overwrite": x + weight,
                "write": written,
                "write twice": (0.5 * written).at[:, 1].add(state[other][:, 0] * 0.25),
            }[change[name]]
        new["n"] = {"keep": state["n"], "count": state["n"] + 1, "overwrite": x[0, 0].astype(np.int32)}[change["n"]]
        new["e"] = x[:0] if change["e"] == "overwrite" else state["e"]
        return [values[-1], *(values[o % len(values)] for o in self._outputs)], new

    def trace(self, weights: Any) -> list[ap.Graph]:
        return [ap.trace(model, weights, batch_of(0), state=BEGIN) for model in self.models]

    @functools.cached_property
    def traced(self) -> list[ap.Graph]:
        """Of its own weights."""
        return self.trace(self.weights)


steps_of = functools.lru_cache(1000)(Steps)
STEPS_OF_STATES = NUMBERS.map(steps_of)
