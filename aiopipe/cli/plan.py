"""``aiopipe plan``: what would run where, how long it would take, and whether it fits; nothing is run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from ..devices.sim import Cluster
from ..errors import AiopipeError, AllocationError, PlacementError
from ..graph import Graph, Kind
from ..loaded import Candidate
from ..loader import Loader
from ..sched.alloc import check_memory, largest_n_copies
from ..sched.partition import partition
from ..sched.plan import Plan, make_plan
from ..trace import trace
from .devices_of import Hardware
from .estimate import estimate
from .interrupt import CtrlC
from .outcome import ExitCode, Failure, FunctionFailed, UsageError, users_line
from .plan_report import Fit, Planned
from .progress import Progress
from .target import Target

__all__ = ["Request", "plan_it", "traced"]

AUTO_COPIES = 4
"""What ``n_copies="auto"`` has at most, as for `Scheduler`."""

MANY_COPIES = 1 << 20

MOST_COPIES = 32
"""More are not tried, unless they are asked for."""

EVALUATIONS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be planned.

    Attributes:
        graph: the user's function, traced.
        hardware: for which devices.
        split: ``"auto"``, or a share for each named device.
        place: or where weights go, by globs over their paths.
        n_copies: how many evaluations are in flight at most; ``"auto"``: as many as fit, up to 4.
        evaluations: how many to estimate for; by default enough to fill the pipeline.
        compile: whether to compile, so that temporaries are known; not for simulated devices.
        detail: how much of the plan to print.
    """

    graph: Graph
    hardware: Hardware
    split: Literal["auto"] | Sequence[float] = "auto"
    place: Mapping[str, str] | None = None
    n_copies: Literal["auto"] | int = "auto"
    evaluations: int | None = None
    compile: bool = False
    detail: Literal[0, 1, 2] = 1


def traced(target: Target, weights: Any, inputs: Sequence[Any], state: Any) -> Graph:
    """The user's function as a graph.

    Raises:
        FunctionFailed: it raised, or JAX refused what it does.
    """
    try:
        return trace(target.fn, weights, *inputs, state=state)
    except AiopipeError:
        raise
    except Exception as error:
        where = users_line(error)
        shapes = ", ".join(map(str, inputs))
        raise FunctionFailed(
            f"the function cannot be traced for {shapes or 'no inputs'}: {type(error).__name__}"
            f"{f' at {where}' if where else ''}: {error}"
        ) from error


def plan_it(request: Request, ctrl_c: CtrlC) -> Planned:
    """Plan, compile if asked to, estimate, and see what fits."""
    hardware = request.hardware
    try:
        plan, fits_in_order = _planned(request, hardware)
        if request.compile:
            plan = ctrl_c.run(_compiled(plan, hardware))
    finally:
        ctrl_c.run(_closed(hardware))
    fit = _fit(request, plan, fits_in_order)
    n_copies = fit.n_copies
    evaluations = request.evaluations or max(EVALUATIONS, 8 * n_copies)
    steps = sorted({n_copies, *(2**i for i in range(min(2 * len(plan.devices), MOST_COPIES).bit_length()))})
    return Planned(
        plan=plan,
        sized=request.compile or hardware.simulated,
        limits=hardware.limits,
        estimate=estimate(plan, hardware.links, n_copies, evaluations),
        by_copies=tuple(estimate(plan, hardware.links, n, max(EVALUATIONS, 8 * n)) for n in steps),
        fit=fit,
        detail=request.detail,
        failure=_failure(request, plan, fit),
    )


def _planned(request: Request, hardware: Hardware) -> tuple[Plan, bool]:
    """The plan, and whether the weights fit the devices in the graph's order."""
    graph, devices, n = request.graph, hardware.devices, hardware.named
    if request.place is not None:
        return make_plan(graph, devices, weights=_homes(graph, request.place, [d.name for d in devices])), True
    ratios = None if request.split == "auto" else list(request.split)
    fits_in_order = True
    try:
        part = partition(graph, devices[:n], ratios=ratios, memory=hardware.limits[:n])
    except PlacementError:
        # Is it the memory? Then there is a plan to show without it.
        part = partition(graph, devices[:n], ratios=ratios, memory=[None] * n)
        fits_in_order = False
    return make_plan(graph, devices, cut=part.node_backend), fits_in_order


def _homes(graph: Graph, place: Mapping[str, str], names: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """For each weight the device that the first glob which matches its path says."""
    homes: dict[int, tuple[int, ...]] = {}
    for tensor in graph.weights:
        if tensor.kind is Kind.WEIGHT and not tensor.name.startswith(("closure/", "literal/")):
            glob = next((glob for glob in place if fnmatchcase(tensor.name, glob)), None)
            if glob is None:
                raise UsageError(
                    f"--place: no glob matches the weight {tensor.name!r}: have {', '.join(place)}; add one for it, or "
                    "'*=DEVICE' as the last"
                )
            homes[tensor.id] = (names.index(place[glob]),)
    return homes


async def _compiled(plan: Plan, hardware: Hardware) -> Plan:
    with Progress() as progress:
        loader = Loader(lambda done, total: progress.step("compiling", done, total))
        return (await loader.prepare(Candidate(plan, hardware.backends), hardware.backends)).plan


async def _closed(hardware: Hardware) -> None:
    for backend in hardware.opened:
        await backend.aclose()


# What fits ----------------------------------------------------------------------------------------


def _fit(request: Request, plan: Plan, fits_in_order: bool) -> Fit:
    limits = request.hardware.limits
    wanted = AUTO_COPIES if request.n_copies == "auto" else request.n_copies
    largest = largest_n_copies(plan.sizes, limits, MANY_COPIES) if fits_in_order else 0
    n_copies = min(wanted, largest) if request.n_copies == "auto" and largest else wanted
    return Fit(
        n_copies=n_copies,
        fits=n_copies <= largest,
        largest_n_copies=None if largest == MANY_COPIES else largest,
        devices_needed=None if largest else _devices_needed(request, 1 if request.n_copies == "auto" else wanted),
    )


def _devices_needed(request: Request, n_copies: int) -> int | None:
    """How many simulated devices like the first would have room; None where nobody can say."""
    hardware = request.hardware
    if not hardware.simulated or request.place is not None or request.split != "auto":
        return None
    props, limit = hardware.devices[0].props, hardware.limits[0]

    def has_room(n: int) -> bool:
        cluster = Cluster(n, memory_nbytes=limit, flops_per_s=props.flops_per_s, bytes_per_s=props.bytes_per_s)
        devices = tuple(backend.device for backend in cluster.backends)
        there = replace(hardware, devices=devices, named=n, limits=(limit,) * n)
        plan, fits_in_order = _planned(request, there)
        return fits_in_order and largest_n_copies(plan.sizes, there.limits, n_copies) == n_copies

    low, most = hardware.named, max(1, len(request.graph.nodes))
    high = low
    while not has_room(high):
        if high >= most:
            return None  # a single node is too large
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_room(middle) else (middle, high)
    return high


def _failure(request: Request, plan: Plan, fit: Fit) -> Failure | None:
    if fit.fits:
        return None
    if fit.largest_n_copies:
        names = [device.name for device in plan.devices]
        try:
            check_memory(plan.sizes, names, request.hardware.limits, fit.n_copies)
        except AllocationError as error:
            return Failure(ExitCode.NO_ROOM, str(error))
    todo = "smaller weights or batches, more devices, or more memory would help"
    if fit.devices_needed is not None:
        todo = f"{fit.devices_needed} devices like the first would have room for it"
    return Failure(ExitCode.NO_ROOM, f"the plan does not fit its devices, not even with n_copies=1: {todo}")
