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
    tensors = graph.tensors
    new_state = {t.id for t in graph.new_state}
    keys: dict[Hashable, Hashable] = {}  # equal layers share one key, which may be as long as the layer
    known: dict[int, dict[Hashable, Program]] = {}  # backend -> key -> program
    for split, donated in zip(splits, donate, strict=True):
        here = known.setdefault(split.backend, {})
        token = bool(split.outputs) and new_state.issuperset(split.outputs)
        key = (_key(graph, split, donated), token)
        program = here.get(key)
        if program is None:
            nodes = tuple([graph.nodes[i] for i in split.nodes])
            outputs = tuple([tensors[t] for t in split.outputs])
            program = here[key] = Program(
                name=f"{graph.name}_{nodes[0].op}_{split.index}",
                nodes=(*nodes, _TOKEN) if token else nodes,
                inputs=tuple([tensors[t].valueless() for t in split.inputs]),  # its executable may outlive the graph
                outputs=(*outputs, _TOKEN_TENSOR) if token else outputs,
                donate=donated,
                config=graph.config,
                key=keys.setdefault(key, key),
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


def _key(graph: Graph, split: Split, donated: tuple[int, ...]) -> Hashable:
    """The split's structure with tensors numbered by first use, so that equal layers compare equal.

    The body is flat, for a layer may be long: of each node its signature, how many operands it has, and which.
    """
    tensors = graph.tensors
    number: dict[int, int] = {}
    types: list[tuple[tuple[int, ...], str]] = []
    for t in split.inputs:
        number[t] = len(number)
        types.append((tensors[t].shape, tensors[t].dtype))
    body: list[Hashable] = []
    for i in split.nodes:
        node = graph.nodes[i]
        body.append(node.fn.signature())
        body.append(len(node.inputs))
        for t in node.inputs:
            body.append(number[t])
        for t in node.outputs:
            number[t] = len(number)
    return (tuple(types), tuple(body), tuple([number[t] for t in split.outputs]), donated, graph.config)
