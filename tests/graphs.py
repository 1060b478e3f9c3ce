"""Graphs and devices made by hand, and a checker of splits: planning is tested without JAX."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from aiopipe.devices.base import Device, DeviceProps, DeviceType
from aiopipe.graph import Graph, Kind, Node
from aiopipe.graph_builder import GraphBuilder
from aiopipe.sched.assign import Assignment
from aiopipe.sched.split import HOST, Split


class FakeOp:
    """Stands for a computation; returns its name and operands, so that results can be compared."""

    def __init__(self, name: str, n_outputs: int = 1) -> None:
        self.name = name
        self.n_outputs = n_outputs

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        return [(self.name, i, *inputs) for i in range(self.n_outputs)]

    def signature(self) -> Hashable:
        return (self.name, self.n_outputs)


class FakeDevice(Device):
    """A device that lacks some ops."""

    def __init__(
        self,
        name: str = "gpu:0",
        *,
        type: DeviceType = DeviceType.GPU,
        client: Hashable = "fake",
        lacks: Collection[str] | Callable[[Node], bool] = (),
        memory_nbytes: int | None = None,
        flops_per_s: float = 1.0,
        bytes_per_s: float = 1.0,
    ) -> None:
        self.name = name
        self.props = DeviceProps(
            type, client, memory_nbytes=memory_nbytes, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s
        )
        self.lacks = lacks

    def supports_op(self, node: Node) -> bool:
        return not self.lacks(node) if callable(self.lacks) else node.op not in self.lacks


def gpus(n: int, *, lacks: Collection[str] = (), cpu_lacks: Collection[str] = ()) -> list[FakeDevice]:
    """`n` accelerators and a host CPU behind them."""
    devices = [FakeDevice(f"gpu:{i}", lacks=lacks) for i in range(n)]
    return [*devices, FakeDevice("cpu:0", type=DeviceType.CPU, client="cpu", lacks=cpu_lacks)]


class Draft(GraphBuilder):
    """A `GraphBuilder` with short names: every tensor is a vector of bytes."""

    def x(self, name: str = "x", nbytes: int = 8) -> int:
        return self.input(name, (nbytes,), "int8", nbytes)

    def w(self, name: str = "w", nbytes: int = 100) -> int:
        return self.weight(name, (nbytes,), "int8", nbytes)

    def op(
        self, op: str, *inputs: int, nbytes: int = 8, flops: float = 1.0, effect: bool = False, source: str = ""
    ) -> int:
        return self.ops(op, *inputs, nbytes=(nbytes,), flops=flops, effect=effect, source=source)[0]

    def ops(
        self,
        op: str,
        *inputs: int,
        nbytes: Sequence[int] = (8,),
        flops: float = 1.0,
        effect: bool = False,
        source: str = "",
    ) -> list[int]:
        """A node with an output for each of `nbytes`."""
        return self.node(
            op,
            inputs,
            [((n,), "int8", n) for n in nbytes],
            fn=FakeOp(f"{op}#{len(self._nodes)}", len(nbytes)),
            source=source or f"model.py:{len(self._nodes)} (f)",
            flops=flops,
            has_effect=effect,
        )


def chain(n_layers: int, *, width: int = 8, weight: int = 100, flops: float = 10.0) -> Graph:
    """x -> (dot with a weight, relu) * n."""
    b = Draft("chain")
    h = b.x(nbytes=width)
    for i in range(n_layers):
        h = b.op("dot_general", h, b.w(f"w{i}", weight), nbytes=width, flops=flops)
        h = b.op("relu", h, nbytes=width, flops=0.0)
    return b.build([h])


def transformer(n_layers: int, *, width: int = 8, wide: int = 32) -> Graph:
    """Layers that are narrow only where the residual stream passes between them: ten nodes each."""
    b = Draft("transformer")
    h = b.op("gather", b.w("embed"), b.x("tokens", 4), nbytes=width)
    for i in range(n_layers):
        n = b.op("norm", h, b.w(f"{i}/norm", 1), nbytes=width)
        qkv = [b.op("dot_general", n, b.w(f"{i}/{k}"), nbytes=wide, flops=100.0) for k in "qkv"]
        scores = b.op("dot_general", qkv[0], qkv[1], nbytes=wide, flops=50.0)
        probs = b.op("softmax", scores, nbytes=wide)
        mixed = b.op("dot_general", probs, qkv[2], nbytes=wide, flops=50.0)
        gate = b.op("dot_general", mixed, h, b.w(f"{i}/up"), nbytes=wide, flops=200.0)
        down = b.op("dot_general", gate, b.w(f"{i}/down"), nbytes=wide, flops=200.0)
        h = b.op("add", h, down, nbytes=width)
    return b.build([h])


def random_graph(rng: random.Random, n_nodes: int) -> Graph:
    """A graph with inputs, weights, cheap ops, views, effects and nodes of several outputs."""
    b = Draft("random")
    tensors = [b.x(f"x{i}", rng.choice([1, 8, 64])) for i in range(rng.randint(0, 3))]
    tensors += [b.w(f"w{i}", rng.choice([1, 8, 64])) for i in range(rng.randint(0, 4))]
    kinds = ["dot_general", "add", "reshape", "broadcast_in_dim", "convert_element_type", "iota", "transpose", "split"]
    for _ in range(n_nodes):
        op = rng.choice(kinds)
        arity = {"dot_general": 2, "add": 3, "iota": 0}.get(op, 1)
        recent = tensors[-8:] if rng.random() < 0.7 else tensors
        inputs = [rng.choice(recent) for _ in range(arity)] if tensors else []
        sizes = [rng.choice([1, 8, 64]) for _ in range(2 if op == "split" else 1)]
        tensors += b.ops(op, *inputs, nbytes=sizes, effect=rng.random() < 0.05)
    return b.build(rng.sample(tensors, k=min(len(tensors), rng.randint(0, 3))))


def naive_splits(graph: Graph, backends: Sequence[int]) -> int:
    """How many splits following the graph's order makes, of the nodes that are wanted."""
    made_by, wanted = graph.producers(), [node.has_effect for node in graph.nodes]
    for tensor in graph.outputs:
        if made_by[tensor.id] >= 0:
            wanted[made_by[tensor.id]] = True
    for node in reversed(graph.nodes):
        for t in node.inputs if wanted[node.index] else ():
            if made_by[t] >= 0:
                wanted[made_by[t]] = True
    order = [b for b, want in zip(backends, wanted, strict=True) if want]
    return sum(1 for i, b in enumerate(order) if i == 0 or order[i - 1] != b)


def from_weights(graph: Graph) -> set[int]:
    """The nodes that read nothing but weights, by themselves or through others like them."""
    constant = {t.id for t in graph.weights}
    found = set()
    for node in graph.nodes:
        if constant.issuperset(node.inputs):
            found.add(node.index)
            constant.update(node.outputs)
    return found


def sanity(graph: Graph, splits: Sequence[Split], assignment: Assignment) -> None:
    """Assert that the splits compute the graph: the rules of `split_graph`, checked one by one."""
    made_by, home = graph.producers(), assignment.node_backend
    constant = from_weights(graph)
    here: dict[tuple[int, int], int] = {}  # (tensor, backend) -> split that makes or brings it
    ran: set[tuple[int, int]] = set()
    read_in: dict[tuple[int, int], set[int]] = {}  # (tensor, backend) -> splits that read it
    for position, split in enumerate(splits):
        assert split.index == position
        assert split.nodes, "an empty split"
        assert list(split.nodes) == sorted(set(split.nodes))
        assert split.recomputed == tuple(i for i in split.nodes if home[i] != split.backend)
        assert all(graph.nodes[i].is_cheap or i in constant for i in split.recomputed)
        made = [t for i in split.nodes for t in graph.nodes[i].outputs]
        used = list(dict.fromkeys(t for i in split.nodes for t in graph.nodes[i].inputs if t not in made))
        assert sorted(split.inputs) == sorted(used)
        assert list(split.inputs) == used, "not in order of first use"
        assert len({c.tensor for c in split.copies}) == len(split.copies)
        depends: set[int] = set()
        copied = {c.tensor: c for c in split.copies}
        assert set(copied) <= set(split.inputs)
        for t in split.inputs:
            tensor = graph.tensors[t]
            read_in.setdefault((t, split.backend), set()).add(position)
            if tensor.kind is Kind.WEIGHT:
                assert t not in copied, "weights are brought when the plan is made"
            elif t in copied:
                assert (t, split.backend) not in here, "brought twice"
                here[t, split.backend] = position
                assert copied[t].nbytes == tensor.nbytes
                if tensor.kind is Kind.INPUT:
                    assert copied[t].src == HOST
                else:
                    assert copied[t].src == home[made_by[t]] != split.backend
                    maker = here[t, copied[t].src]
                    assert t in splits[maker].outputs
                    read_in.setdefault((t, copied[t].src), set()).add(position)
                    depends.add(maker)
            else:
                maker = here[t, split.backend]
                assert maker < position
                assert t in splits[maker].outputs or t in {c.tensor for c in splits[maker].copies}
                depends.add(maker)
        assert split.depends == tuple(sorted(depends))
        for i in split.nodes:
            assert (i, split.backend) not in ran, "computed twice on one backend"
            ran.add((i, split.backend))
            for t in graph.nodes[i].outputs:
                here[t, split.backend] = position
    wanted = {(t.id, home[made_by[t.id]]) for t in graph.outputs if t.kind is Kind.NODE}
    for tensor, backend in wanted:
        assert tensor in splits[here[tensor, backend]].outputs, "the caller does not get an output"
    for split in splits:
        made = [t for i in split.nodes for t in graph.nodes[i].outputs]
        read_by = {t: read_in.get((t, split.backend), set()) - {split.index} for t in made}
        outside = [t for t in made if (t, split.backend) in wanted or read_by[t]]
        assert list(split.outputs) == sorted(outside)
        for i in split.nodes:
            node = graph.nodes[i]
            inside = any(set(node.outputs) & set(graph.nodes[j].inputs) for j in split.nodes)
            assert node.has_effect or inside or set(node.outputs) & set(split.outputs), f"{node.name} is not needed"
    for node in graph.nodes:
        if node.has_effect:
            assert (node.index, home[node.index]) in ran
    effects = [(s.backend, i) for s in splits for i in s.nodes if graph.nodes[i].has_effect]
    assert len(effects) == len(set(effects)) == sum(node.has_effect for node in graph.nodes)
    for backend in {b for b, _ in effects}:
        order = [i for b, i in effects if b == backend]
        assert order == sorted(order), "effects out of order"
