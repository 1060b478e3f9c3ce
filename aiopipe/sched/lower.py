"""Splits to programs: what the devices compile, each distinct one once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from ..devices.base import Program
from ..graph import Graph, Kind, Node, Tensor
from .split import Split

__all__ = ["lower"]


def lower(graph: Graph, splits: Sequence[Split], donate: Sequence[tuple[int, ...]]) -> tuple[Program, ...]:
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
    programs: list[Program] = []
    tensors, nodes = graph.tensors, graph.nodes
    new_state = {t.id for t in graph.new_state}
    numbers: dict[Hashable, int] = {}  # of the keys, which may be long: each is hashed once, and kept once
    known: dict[tuple[int, int], Program] = {}  # number of the key, backend -> program
    keys: list[Hashable] = []
    for split, donated in zip(splits, donate, strict=True):
        token = bool(split.outputs) and new_state.issuperset(split.outputs)
        key = _key(graph, split, donated, token)
        number = numbers.setdefault(key, len(keys))
        if number == len(keys):
            keys.append(key)
        program = known.get((number, split.backend))
        if program is None:
            run = tuple([nodes[i] for i in split.nodes])
            outputs = tuple([tensors[t] for t in split.outputs])
            program = known[number, split.backend] = Program(
                name=f"{graph.name}_{run[0].op}_{split.index}",
                nodes=(*run, _TOKEN) if token else run,
                inputs=tuple([tensors[t].valueless() for t in split.inputs]),  # its executable may outlive the graph
                outputs=(*outputs, _TOKEN_TENSOR) if token else outputs,
                donate=donated,
                config=graph.config,
                key=keys[number],
            )
        programs.append(program)
    return tuple(programs)


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
