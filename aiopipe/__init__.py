"""aiopipe: asyncio-native pipeline-parallel execution on JAX devices."""

from .backend import Backend, Buffer, devices, open_backend, open_backends, register_backend
from .devices.base import BufferType, BufferUsage, Device, DeviceProps, DeviceType
from .devices.sim import open_sim
from .devices.xla import open_xla, xla_devices
from .errors import (
    AiopipeError,
    AllocationError,
    BackendClosedError,
    BackendLostError,
    EvaluationAborted,
    EvaluationError,
    PlacementError,
    TensorError,
    TraceError,
    WrongLoopError,
)
from .evaluation import Evaluation
from .events import Event
from .graph import Graph, GraphBuilder, Node, Tensor
from .pipeline import Pipeline
from .placement import place
from .sched.plan import Plan
from .sched.scheduler import Scheduler
from .statistics import Statistics
from .trace import trace

__version__ = "0.1.0"

__all__ = [
    "AiopipeError",
    "AllocationError",
    "Backend",
    "BackendClosedError",
    "BackendLostError",
    "Buffer",
    "BufferType",
    "BufferUsage",
    "Device",
    "DeviceProps",
    "DeviceType",
    "Evaluation",
    "EvaluationAborted",
    "EvaluationError",
    "Event",
    "Graph",
    "GraphBuilder",
    "Node",
    "Pipeline",
    "PlacementError",
    "Plan",
    "Scheduler",
    "Statistics",
    "Tensor",
    "TensorError",
    "TraceError",
    "WrongLoopError",
    "devices",
    "open_backend",
    "open_backends",
    "place",
    "register_backend",
    "trace",
]


def _register() -> None:
    for platform in ("cpu", "gpu", "tpu"):
        register_backend(platform, open_xla(platform), devices=lambda platform=platform: xla_devices(platform))  # type: ignore[misc]
    register_backend("sim", open_sim)


_register()
