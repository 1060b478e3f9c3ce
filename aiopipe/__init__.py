"""aiopipe: asyncio-native pipeline-parallel execution on JAX devices."""

from .backend import Backend
from .batch_tally import BatcherStatistics
from .batcher import Batcher
from .buffer import Buffer, tensor_view
from .compare import compare_backends, graph_copy
from .comparison import Comparison, NodeDifference
from .devices.base import BufferType, BufferUsage, Capabilities, Device, DeviceProps, DeviceType
from .devices.ray import open_ray
from .devices.sim import open_sim
from .devices.xla import open_xla, xla_devices
from .errors import (
    AiopipeError,
    AllocationError,
    BackendClosedError,
    BackendLostError,
    DeadlineExceeded,
    EvaluationAborted,
    EvaluationError,
    ForkedError,
    OutOfMemoryError,
    OverloadedError,
    PlacementError,
    ReplanError,
    StateError,
    TensorError,
    TraceError,
    WrongLoopError,
)
from .evaluation import Evaluation
from .events import Event
from .fetch import fetch
from .graph import Graph, Node, Tensor
from .graph_builder import GraphBuilder
from .graph_plan import GraphPlan
from .handle import Handle
from .observe import EvalCallback
from .pipeline import Pipeline
from .placement import place
from .progress import Progress
from .registry import devices, open_backend, open_backends, register_backend, registered_backends
from .sched.plan import Plan
from .sched.scheduler import Scheduler
from .spans import Overlap, Span
from .state import Snapshot, State
from .statistics import Statistics
from .sync import run_sync
from .tensor_moves import Reading, tensor_copy_async
from .timeline import Timeline
from .trace import trace

__version__ = "0.1.0"

__all__ = [
    "AiopipeError",
    "AllocationError",
    "Backend",
    "BackendClosedError",
    "BackendLostError",
    "Batcher",
    "BatcherStatistics",
    "Buffer",
    "BufferType",
    "BufferUsage",
    "Capabilities",
    "Comparison",
    "DeadlineExceeded",
    "Device",
    "DeviceProps",
    "DeviceType",
    "EvalCallback",
    "Evaluation",
    "EvaluationAborted",
    "EvaluationError",
    "Event",
    "ForkedError",
    "Graph",
    "GraphBuilder",
    "GraphPlan",
    "Handle",
    "Node",
    "NodeDifference",
    "OutOfMemoryError",
    "Overlap",
    "OverloadedError",
    "Pipeline",
    "PlacementError",
    "Plan",
    "Progress",
    "Reading",
    "ReplanError",
    "Scheduler",
    "Snapshot",
    "Span",
    "State",
    "StateError",
    "Statistics",
    "Tensor",
    "TensorError",
    "Timeline",
    "TraceError",
    "WrongLoopError",
    "compare_backends",
    "devices",
    "fetch",
    "graph_copy",
    "open_backend",
    "open_backends",
    "place",
    "register_backend",
    "registered_backends",
    "run_sync",
    "tensor_copy_async",
    "tensor_view",
    "trace",
]


def _register() -> None:
    for platform in ("cpu", "gpu", "tpu"):
        register_backend(platform, open_xla(platform), devices=lambda platform=platform: xla_devices(platform))  # type: ignore[misc]
    register_backend("sim", open_sim)
    register_backend("ray", open_ray)


_register()
