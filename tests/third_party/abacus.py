"""A backend for aiopipe as somebody else would write their first: one thing at a time, values in NumPy.

It has no events, launches nothing asynchronously, and overrides nothing that it need not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from aiopipe import Backend, Device, DeviceProps, DeviceType, Node, PlacementError, Tensor
from aiopipe.backend import Executable
from aiopipe.devices.base import MemoryStats, Program

N_DEVICES = 2


class AbacusDevice(Device):
    def __init__(self, index: int) -> None:
        self.name = f"abacus:{index}"
        self.props = DeviceProps(DeviceType.OTHER, client=self.name, is_async=False, events=False)

    def supports_op(self, node: Node) -> bool:
        return node.op != "tanh"


class Abacus(Backend):
    """The minimum: compile, put a value here, read it."""

    def load(self, program: Program) -> Executable:
        def call(*inputs: Any) -> Sequence[Any]:
            values = {tensor.id: value for tensor, value in zip(program.inputs, inputs, strict=True)}
            for node in program.nodes:
                made = node.fn(*(values[t] for t in node.inputs))
                values.update(zip(node.outputs, map(frozen, made), strict=True))
            return [values[tensor.id] for tensor in program.outputs]

        return Executable(program, call, MemoryStats(), blocks=True)

    def upload(self, value: Any, tensor: Tensor) -> np.ndarray[Any, Any]:
        return frozen(np.array(value, getattr(ml_dtypes, tensor.dtype, tensor.dtype)))

    def download(self, value: Any) -> np.ndarray[Any, Any]:
        return np.asarray(value)


def frozen(value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    array.flags.writeable = False
    return array


def open_abacus(params: str, *, dispatch: Any = "auto") -> Abacus:
    index = int(params or 0)
    if not 0 <= index < N_DEVICES:
        raise PlacementError(f"unknown device 'abacus:{params}': there are {N_DEVICES}, counted from 0")
    device = AbacusDevice(index)
    return Abacus(device.name, device, dispatch=dispatch)


open_abacus.devices = lambda: [AbacusDevice(i) for i in range(N_DEVICES)]  # type: ignore[attr-defined]
