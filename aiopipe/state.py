"""`State`: arrays that stay on their devices from one evaluation to the next, as KV caches do."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from ._jax_types import dtype_name, is_scalar, nbytes_of, spec_of
from ._specs import HasSpecs, named_leaves, state_specs
from .backend import Backend
from .buffer import held_value
from .errors import StateError
from .graph import Graph, PerGraph, Tensor

__all__ = ["Owner", "Snapshot", "State", "check_state"]


class Owner(Protocol):
    """What a state asks of the scheduler that it is used with."""

    async def snapshot(self, state: State) -> list[Any]:
        """Copies of the arrays as they are behind everything that was submitted so far."""
        ...

    def adopt(self, state: State) -> None:
        """Count the bytes of a state that has arrays."""
        ...

    async def settle(self, state: State) -> None:
        """Wait until nothing that uses the state is under way."""
        ...

    def freed(self, copier: Graph | None) -> None:
        """A state was freed, of which this graph made copies."""
        ...


class Snapshot:
    """What a `State` held at one moment. Immutable: it can be restored any number of times.

    Attributes:
        state_name: of the state that it was taken of.
        structure: that of the state; see `State`.
        nbytes: bytes that it holds on its devices.
    """

    def __init__(self, name: str, structure: tuple[Any, Any], leaves: Sequence[Any], nbytes: int) -> None:
        self.state_name = name
        self.nbytes = nbytes
        self.structure = structure
        self._leaves = tuple(leaves)

    @property
    def value(self) -> Any:
        """The arrays, as a pytree of the state's structure, each on its device. Those of NumPy are read-only."""
        return jax.tree.unflatten(self.structure[0], map(_shown, self._leaves))

    def __repr__(self) -> str:
        return f"<Snapshot of state {self.state_name!r}, {self.nbytes} bytes>"


class State(HasSpecs):
    """Arrays that evaluations read and replace in place: ``graph_compute_async(graph, *inputs, state=state)``.

    Evaluations that share a state run in the order in which they were submitted; those of different states
    overlap. Each array stays on the backend that computes its next value, which takes over its memory.
    An evaluation that fails, is aborted, or is cancelled when a part of it has been launched, leaves the state
    in between: it is marked, and every later use raises `StateError` until `reset` or `restore`.
    A graph takes any state whose arrays have its shapes and types in its order; their names are for messages.

    Args:
        values: a pytree of arrays, whose values it begins with (they are copied, when it is first used), or of
            `jax.ShapeDtypeStruct`s, which stand for zeros. Arrays that are committed to a device, or `Tensor`s from
            `place`, stay there (cause ``1.dst``); others go where the first graph that uses the state has them.
        name: for messages.

    Raises:
        TensorError: a leaf is nothing that JAX computes with.

    Attributes:
        name: for messages.
        specs: the pytree as `jax.ShapeDtypeStruct`s.
        names: of the arrays: their paths.
        structure: equal for states whose arrays have the same paths, shapes and types.
        sizes: bytes of each array.
        nbytes: bytes of all of them.
        error: why it is marked, or None.
        n_evaluations: evaluations that have replaced its arrays.
        home_indices: of each array's backend, among those of the scheduler; empty before the first evaluation.
        copier: the graph by which its scheduler copies it, if any state of its kind was copied.
        turn: held while a snapshot that has begun waits for its plan.
    """

    def __init__(self, values: Any, *, name: str = "state") -> None:
        self.name = name
        self.names, leaves, treedef = named_leaves(values)
        specs = state_specs(values)
        self.specs = specs
        self._types = tuple((tuple(s.shape), dtype_name(s.dtype)) for s in jax.tree.leaves(specs))
        self.structure = (treedef, self._types)
        self.sizes = tuple(nbytes_of(shape, dtype) for shape, dtype in self._types)
        self.nbytes = sum(self.sizes)
        self.error: BaseException | None = None
        self._marked_by = -1
        self.n_evaluations = 0
        self._initial: tuple[Any, ...] = tuple(map(_private, leaves))
        self._source = self._initial
        self._arrays: list[Any] | None = None
        self.home_indices: tuple[int, ...] = ()
        self._homes: tuple[Backend, ...] = ()
        self._owner: weakref.ref[Any] | None = None
        self._gone = ""
        self.copier: Graph | None = None
        self.turn = asyncio.Lock()
        self.fitting: PerGraph[bool] = PerGraph()  # graphs that were found to fit

    @property
    def backends(self) -> Mapping[str, str]:
        """Where each array is: its path -> the name of its backend. Empty before the first evaluation."""
        return dict(zip(self.names, (b.name for b in self._homes), strict=bool(self._homes)))

    async def snapshot(self) -> Snapshot:
        """The arrays as they are behind everything that was submitted so far, copied on their devices.

        Raises:
            StateError: the state is marked or freed.
        """
        self.check_usable()
        owner = self._owned_by()
        leaves = self._filled(self._source) if owner is None or self._arrays is None else await owner.snapshot(self)
        return Snapshot(self.name, self.structure, leaves, self.nbytes)

    async def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, also one of another state of the same structure; takes a mark away.

        Waits until what was submitted has finished. The arrays are copied when the state is used next.

        Raises:
            StateError: the snapshot is of another structure, or the state is freed.
        """
        if snapshot.structure != self.structure:
            raise StateError(
                f"{self!r} cannot be restored from {snapshot!r}: it has other arrays; restore one of the same structure"
            )
        await self._replace(snapshot._leaves)

    async def fork(self, name: str | None = None) -> State:
        """Another state that begins where this one is, behind everything that was submitted so far.

        From then on neither sees the other's evaluations. Copying happens on the devices, at once.

        Args:
            name: of the new state; this one's with ``" fork"`` by default.

        Raises:
            StateError: the state is marked or freed.
        """
        self.check_usable()
        owner = self._owned_by()
        arrays = None if owner is None or self._arrays is None else await owner.snapshot(self)
        other = State(self.specs, name=name or f"{self.name} fork")
        other._initial, other._source, other._arrays = self._initial, self._source, arrays
        other._homes, other.home_indices, other._owner = self._homes, self.home_indices, self._owner
        if owner is not None and arrays is not None:
            owner.adopt(other)
        return other

    async def reset(self) -> None:
        """Go back to the values that the state was made with; takes a mark away.

        Waits until what was submitted has finished.

        Raises:
            StateError: the state is freed.
        """
        await self._replace(self._initial)

    async def free(self) -> None:
        """Give the memory back, when what was submitted has finished. Using it afterwards raises `StateError`."""
        if not self._gone:
            await self._settle()
            owner, copier = self._owned_by(), self.copier
            self.end("was freed")
            if owner is not None:
                owner.freed(copier)

    # What follows is for the scheduler -------------------------------------------------------------

    def begin_values(self) -> list[Any]:
        """What the state was made with: an array for each leaf."""
        return self._filled(self._initial)

    def check_usable(self) -> None:
        """Raise `StateError` where the state is marked or freed."""
        self._check_there()
        if self.error is not None:
            raise self.refusal()

    def refusal(self) -> StateError:
        """What who uses a marked state gets; its cause is what marked it."""
        error = StateError(
            f"{self!r} cannot be used: an evaluation left it in between ({self.error}); "
            "`await state.reset()`, or restore a snapshot"
        )
        error.__cause__ = self.error
        return error

    @property
    def is_allocated(self) -> bool:
        """Whether its arrays are on their backends."""
        return self._arrays is not None

    def take(self, slots: Sequence[tuple[int, int, int]], env: list[Any]) -> None:
        """Hand the arrays to an evaluation whose turn it is.

        Args:
            slots: (position of the array, slot to read it from, slot where its next value will be), -1 for none.
            env: the evaluation's slots.
        """
        arrays = self._arrays
        assert arrays is not None, "allocated before it is submitted"
        for position, enter, leave in slots:
            if enter < 0:
                continue  # read by nobody: it stays here for the case that nothing is launched
            env[enter] = arrays[position]
            if leave >= 0:
                arrays[position] = None  # memory that nobody takes over is free when its last reader is done

    def give_back(self, slots: Sequence[tuple[int, int, int]], env: Sequence[Any], *, untouched: bool) -> bool:
        """Take the arrays' next values from an evaluation; the old ones where it launched nothing (`untouched`).

        Returns:
            False where some are not there: the evaluation stopped on the way.
        """
        arrays = self._arrays
        if arrays is None:
            return False
        for position, enter, leave in slots:
            if leave >= 0 and not untouched:
                arrays[position] = env[leave]
            elif leave >= 0 and enter >= 0:
                arrays[position] = env[enter]
        self.n_evaluations += not untouched
        return all(array is not None for array in arrays)

    def end(self, why: str) -> None:
        """Let go of everything, for good."""
        self._gone = why
        self._arrays, self._source, self._initial, self.copier = None, (), (), None

    def mark(self, error: BaseException, by: int) -> None:
        """An evaluation left the arrays in between. Of several, the error of the one submitted first stays."""
        if self.error is None or by < self._marked_by:
            self.error, self._marked_by = error, by

    def refusal_for(self, evaluation: int) -> StateError | None:
        """The refusal, where one that was submitted before that evaluation left the arrays in between."""
        return self.refusal() if self.error is not None and self._marked_by < evaluation else None

    def _filled(self, values: Sequence[Any]) -> list[Any]:
        """Values with zeros where none were given."""
        return [np.zeros(*spec) if v is None else v for v, spec in zip(values, self.structure[1], strict=True)]

    def _owned_by(self) -> Owner | None:
        return None if self._owner is None else self._owner()

    def _check_there(self) -> None:
        if self._gone:
            raise StateError(f"{self!r} {self._gone}: make a new one")

    async def _settle(self) -> None:
        owner = self._owned_by()
        if owner is not None:
            await owner.settle(self)

    async def _replace(self, leaves: tuple[Any, ...]) -> None:
        self._check_there()
        await self._settle()
        self._check_there()  # it may have been freed, or its scheduler closed, meanwhile
        self._arrays, self._source, self.error = None, leaves, None

    def __repr__(self) -> str:
        return f"<State {self.name!r}, {len(self.names)} arrays, {self.nbytes} bytes>"


def _private(leaf: Any) -> Any:
    """A value that stays as it is, whatever the caller does to its own; None for zeros."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    if isinstance(leaf, Tensor):
        return held_value(leaf)
    if is_scalar(leaf):
        return np.asarray(leaf, spec_of(leaf).dtype)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _shown(leaf: Any) -> Any:
    """An array for the user to read: where it is NumPy's, a state may begin with that very memory."""
    if isinstance(leaf, np.ndarray):
        leaf = leaf.view()
        leaf.flags.writeable = False
    return leaf


def check_state(graph: Graph, state: State | None) -> None:
    """Refuse a state that cannot be used, or that a graph was not traced for.

    Raises:
        StateError: says which array differs, or what is missing.
    """
    if state is None:
        if graph.state:
            raise StateError(
                f"graph {graph.name!r} was traced with a state ({graph.state[0].describe()}, …) but got none: "
                "give state=aiopipe.State(...)"
            )
        return
    state.check_usable()
    if graph in state.fitting:
        return
    wanted = tuple((t.shape, t.dtype) for t in graph.state)
    if wanted != state.structure[1]:
        got = dict(zip(state.names, state.structure[1], strict=True))
        for t in graph.state:
            if got.get(t.name) != (t.shape, t.dtype):
                found = f"has {got[t.name][1]}{list(got[t.name][0])}" if t.name in got else "has no such array"
                raise StateError(
                    f"graph {graph.name!r} takes state {t.describe()}, but {state!r} {found}: trace with state=state"
                )
        raise StateError(f"graph {graph.name!r} takes {len(wanted)} arrays of state, but {state!r} has {len(got)}")
    state.fitting.put(graph, True)
