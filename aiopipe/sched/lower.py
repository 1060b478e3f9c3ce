"""Splits to programs: what the devices compile, each distinct one once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from ..devices.base import Program
from ..graph import Graph, Kind, Node, Tensor
from .split import Split

__all__ = ["Programs", "lower"]


def lower(graph: Graph, splits: Sequence[Split], donate: Sequence[tuple[int, ...]]) -> Programs:
    """A program for each split, in order.

    Args:
        graph: what the splits are runs of.
        splits: from `split_graph`.
        donate: for each split the positions in its inputs that its outputs may take over.

    Returns:
        Programs; splits that compute the same function of the same types have programs with equal keys, so
        that a device compiles them once. On one backend they share one program, which has the nodes and the
        tensors of the first of them. One that makes nothing but state returns a token behind it, as something
        to wait for (`alloc.marker_of`).
    """
    new_state = {t.id for t in graph.new_state}
    known: dict[Hashable, int] = {}  # keys, which may be long: each is hashed once, and kept once
    first: dict[tuple[int, int], int] = {}  # number of the key, backend -> the first split with that program
    firsts: list[int] = []
    numbers: list[int] = []
    for i, (split, donated) in enumerate(zip(splits, donate, strict=True)):
        token = _has_token(split, new_state) if new_state else False
        number = known.setdefault(_key(graph, split, donated, token), len(known))
        numbers.append(number)
        firsts.append(first.setdefault((number, split.backend), i))
    return Programs(graph, splits, donate, firsts, numbers, tuple(known))


def _has_token(split: Split, new_state: set[int]) -> bool:
    """Whether a split makes nothing but state."""
    return bool(split.outputs) and new_state.issuperset(split.outputs)


class Programs(Sequence[Program]):
    """The programs of all splits.

    There may be as many as nodes, and whoever looks at a plan needs none of them: each is made when it is asked for.

    Args:
        graph: what the splits are runs of.
        splits: all of them.
        donate: for each split the positions in its inputs that its outputs may take over.
        firsts: for each split the position of the first one that has the same program.
        numbers: for each split the position of its program's key in `keys`.
        keys: the keys of all programs.
    """

    __slots__ = ("_donate", "_firsts", "_graph", "_keys", "_made", "_new_state", "_numbers", "_splits")

    def __init__(
        self,
        graph: Graph,
        splits: Sequence[Split],
        donate: Sequence[tuple[int, ...]],
        firsts: Sequence[int],
        numbers: Sequence[int],
        keys: Sequence[Hashable],
    ) -> None:
        self._graph, self._splits, self._donate = graph, splits, donate
        self._firsts, self._numbers, self._keys = firsts, numbers, keys
        self._new_state = {t.id for t in graph.new_state}
        self._made: dict[int, Program] = {}

    @overload
    def __getitem__(self, index: int) -> Program: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Program, ...]: ...

    def __getitem__(self, index: int | slice) -> Program | tuple[Program, ...]:
        if isinstance(index, slice):
            return tuple(map(self._of, self._firsts[index]))
        return self._of(self._firsts[index])

    def __iter__(self) -> Iterator[Program]:
        return map(self._of, self._firsts)

    def __len__(self) -> int:
        return len(self._firsts)

    def _of(self, index: int) -> Program:
        """The program that this split was the first to have."""
        made = self._made.get(index)
        return made or self._made.setdefault(index, self._make(index))  # one, also if two threads ask at once

    def _make(self, index: int) -> Program:
        graph, split = self._graph, self._splits[index]
        tensors = graph.tensors
        run = tuple([graph.nodes[i] for i in split.nodes])
        outputs = tuple([tensors[t] for t in split.outputs])
        token = _has_token(split, self._new_state)
        return Program(
            name=f"{graph.name}_{run[0].op}_{split.index}",
            nodes=(*run, _TOKEN) if token else run,
            inputs=tuple([tensors[t].valueless() for t in split.inputs]),  # its executable may outlive the graph
            outputs=(*outputs, _TOKEN_TENSOR) if token else outputs,
            donate=self._donate[index],
            config=graph.config,
            key=self._keys[self._numbers[index]],
        )


class _Token:
    """The `Op` that makes something to wait for."""

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return (np.zeros((), np.bool_),)

    def signature(self) -> Hashable:
        return "token"


_TOKEN_TENSOR = Tensor(-1, "token", (), "bool", Kind.NODE, 1)
_TOKEN = Node(-1, "full", (), (-1,), _Token(), "the end of a split")


def _key(graph: Graph, split: Split, donated: tuple[int, ...], token: bool) -> Hashable:
    """The split's structure with tensors numbered by first use, so that equal layers compare equal.

    Flat, for a layer may be long, and each tuple more is one more for the garbage collector to look at: how many
    inputs there are, and the type of each; how many nodes, and of each its signature, how many operands it has, and
    which; then what it returns.
    """
    tensors, nodes = graph.tensors, graph.nodes
    number: dict[int, int] = {}
    key: list[Hashable] = [len(split.inputs), len(split.nodes), token]
    for t in split.inputs:
        number[t] = len(number)
        tensor = tensors[t]
        key += (tensor.shape, tensor.dtype)
    for i in split.nodes:
        node = nodes[i]
        key += (node.fn.signature(), len(node.inputs))
        for t in node.inputs:
            key.append(number[t])
        for t in node.outputs:
            number[t] = len(number)
    for t in split.outputs:
        key.append(number[t])
    key += (donated, graph.config)
    return tuple(key)
