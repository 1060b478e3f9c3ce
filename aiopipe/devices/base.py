"""What a device is, and what it is given to run. Pure descriptions: planning sees only these."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..graph import Node, Tensor

__all__ = ["BufferType", "BufferUsage", "Capabilities", "Device", "DeviceProps", "DeviceType", "MemoryStats",
    "NodeFailure", "Program"]


OFFLOAD_FLOPS_PER_BYTE = 15.0
"""From how many operations for each byte on an accelerator wants a node whose weight is on the host.

Just below the 16 of 32 rows times a float32 matrix, for the rows themselves are bytes, too."""


class DeviceType(enum.Enum):
    """The kind of hardware."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    SIM = "sim"
    OTHER = "other"


class BufferUsage(enum.Enum):
    """What a buffer is for; WEIGHTS drives placement rule ``1.wgt``."""

    ANY = "any"
    WEIGHTS = "weights"
    COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class BufferType:
    """Memory of one kind on one device.

    Attributes:
        device: name of the device.
        memory_kind: JAX's name of the memory, e.g. ``"device"`` or ``"pinned_host"``.
        is_host: whether the host can read it in place.
        alignment: bytes.
        max_nbytes: the largest single buffer, or None.
    """

    device: str
    memory_kind: str = "device"
    is_host: bool = False
    alignment: int = 64
    max_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceProps:
    """What a device can do.

    Attributes:
        type: the kind of hardware.
        client: equal for devices between which copies are asynchronous (one JAX client).
        is_async: it computes while its dispatcher goes on.
        aliases_host: a NumPy array can be handed to it without a copy.
        view_nbytes: values of its client up to this size may be handed to it as views of the
            producer's memory, so they are never donated; larger ones are copied.
        events: its queue can record events; waiting for those of others works everywhere.
        memory_nbytes: bytes that it may use, or None when unknown.
        remote: it is on another machine: reading a value of it, and putting one there, takes a way over the network.
        flops_per_s: rough speed; only the ratio between devices matters.
        bytes_per_s: rough memory bandwidth; only the ratio between devices matters.
    """

    type: DeviceType
    client: Hashable
    is_async: bool = True
    aliases_host: bool = False
    view_nbytes: int = 0
    events: bool = True
    memory_nbytes: int | None = None
    remote: bool = False
    flops_per_s: float = 5e10
    bytes_per_s: float = 1e10


class Capabilities(NamedTuple):
    """What work by hand can count on (as ggml's ``ggml_backend_dev_caps``).

    Attributes:
        is_async: it computes while its dispatcher goes on.
        host_buffer: it has memory that the host can read in place.
        borrows_host: the host's memory can be a buffer of it, without a copy.
        events: its queue can record events.
    """

    is_async: bool
    host_buffer: bool
    borrows_host: bool
    events: bool


class Device(ABC):
    """Something that can compute. Immutable; holds no arrays and no threads."""

    name: str
    props: DeviceProps

    @property
    def is_host_cpu(self) -> bool:
        """Whether it is a CPU, so fit to be the last backend, which never spreads."""
        return self.props.type is DeviceType.CPU

    @property
    def capabilities(self) -> Capabilities:
        """What work by hand can count on."""
        host_buffer = any(kind.is_host for kind in self.buffer_types())
        return Capabilities(self.props.is_async, host_buffer, self.props.aliases_host, self.props.events)

    def buffer_types(self) -> tuple[BufferType, ...]:
        """The kinds of memory that it has, the default one first."""
        return (BufferType(self.name, is_host=self.props.aliases_host),)

    def supports_buffer_type(self, buffer_type: BufferType) -> bool:
        """Whether its ops can read memory of that type in place."""
        return buffer_type.device == self.name

    @abstractmethod
    def supports_op(self, node: Node) -> bool:
        """Whether it can run the node."""

    def offload_op(self, node: Node) -> bool:
        """Whether it is worth running the node here although its weight is on the host.

        Asked only with ``op_offload=True``. By default an accelerator wants what computes much for
        the bytes that it reads: `OFFLOAD_FLOPS_PER_BYTE`, which a float32 product of 32 rows with a large
        matrix does. ggml's CUDA backend offloads from the same 32 rows on.
        """
        return (
            self.props.type in (DeviceType.GPU, DeviceType.TPU) and node.flops >= OFFLOAD_FLOPS_PER_BYTE * node.nbytes
        )


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A run of nodes as one function: what a device compiles.

    Attributes:
        name: shows in profiles.
        nodes: in order.
        inputs: tensors that it takes, in order.
        outputs: tensors that it returns, in order; never empty, never one of `inputs`.
        donate: positions in `inputs` whose memory the outputs may take over.
        config: JAX settings to compile under (`Graph.config`).
        key: equal keys mean equal executables on one device.
    """

    name: str
    nodes: tuple[Node, ...] = field(repr=False)
    inputs: tuple[Tensor, ...] = field(repr=False)
    outputs: tuple[Tensor, ...] = field(repr=False)
    donate: tuple[int, ...] = ()
    config: Any = field(default=None, repr=False)
    key: Hashable = field(default=None, repr=False)


class NodeFailure(Exception):
    """What an executable may raise where it knows which of its program's nodes is to blame.

    Attributes:
        position: of the node in `Program.nodes`, or None where that is not known after all.
    """

    def __init__(self, message: str, *, position: int | None = None) -> None:
        super().__init__(message)
        self.position = position


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes that one executable needs, as its compiler reports them.

    Attributes:
        temp_nbytes: scratch while it runs.
        output_nbytes: its results.
        argument_nbytes: its operands.
        code_nbytes: the machine code.
    """

    temp_nbytes: int = 0
    output_nbytes: int = 0
    argument_nbytes: int = 0
    code_nbytes: int = 0
