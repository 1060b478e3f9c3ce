"""What a comparison of two backends found, as frozen values. Pure; `compare.py` does the comparing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Comparison", "NodeDifference", "array_difference"]

_SHOWN = 5
"""So many nodes does a printed comparison list."""


@dataclass(frozen=True, slots=True)
class NodeDifference:
    """How far two backends are apart after one node, computed from equal operands.

    Attributes:
        index: of the node in `Graph.nodes`.
        node: its name, e.g. ``"tanh#3"``.
        op: name of its primitive.
        source: the user's source line.
        max_abs_difference: the largest ``abs(a - b)`` over all elements of all its results; 0 where both
            are NaN or the same infinity; ``inf`` where only one of them is NaN, where infinities
            differ, and where the results have different shapes or types.
        max_abs_value: the largest finite ``abs(a)``, to judge the difference by.
        n_nan_differs: elements that are NaN in one result and not in the other.
        supported: False where the second backend lacks the op: nothing was compared.
    """

    index: int
    node: str
    op: str
    source: str
    max_abs_difference: float = 0.0
    max_abs_value: float = 0.0
    n_nan_differs: int = 0
    supported: bool = True

    @property
    def relative_difference(self) -> float:
        """`max_abs_difference` as a share of `max_abs_value`; 0 where nothing differs."""
        if self.max_abs_difference == 0.0:
            return 0.0
        return self.max_abs_difference / self.max_abs_value if self.max_abs_value else math.inf

    def __str__(self) -> str:
        if not self.supported:
            return f"{self.node} at {self.source or 'an unknown line'}: not supported"
        nan = f", {self.n_nan_differs} NaN in one of them only" if self.n_nan_differs else ""
        return (
            f"{self.node} at {self.source or 'an unknown line'}: differs by {self.max_abs_difference:.3g} "
            f"where values reach {self.max_abs_value:.3g}{nan}"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_backends` found; print it.

    Attributes:
        graph: name of the graph.
        a: name of the backend whose results are the reference.
        b: name of the other.
        nodes: a difference for each node that was looked at, in the graph's order.
        n_nodes: how many nodes the graph has.
        stopped: the callback ended the comparison.
    """

    graph: str
    a: str
    b: str
    nodes: tuple[NodeDifference, ...] = field(repr=False)
    n_nodes: int
    stopped: bool

    @property
    def largest(self) -> NodeDifference | None:
        """The node with the largest absolute difference, the first of several; None if none was compared."""
        compared = [node for node in self.nodes if node.supported]
        return max(compared, key=lambda node: node.max_abs_difference, default=None)

    @property
    def max_abs_difference(self) -> float:
        """The largest absolute difference of all nodes; 0 if none was compared."""
        largest = self.largest
        return 0.0 if largest is None else largest.max_abs_difference

    @property
    def unsupported(self) -> tuple[NodeDifference, ...]:
        """The nodes that the second backend lacks."""
        return tuple(node for node in self.nodes if not node.supported)

    def above(self, tolerance: float) -> tuple[NodeDifference, ...]:
        """The nodes whose absolute difference is larger than `tolerance`, in the graph's order."""
        return tuple(node for node in self.nodes if node.max_abs_difference > tolerance)

    def __str__(self) -> str:
        n_compared = len(self.nodes) - len(self.unsupported)
        lines = [
            f"{self.graph!r} on {self.a} and {self.b}: {n_compared} of {self.n_nodes} nodes compared, "
            f"largest difference {self.max_abs_difference:.3g}{' (stopped by the callback)' if self.stopped else ''}"
        ]
        ranked = sorted(self.above(0.0), key=lambda node: -node.max_abs_difference)
        shown = [*ranked[:_SHOWN], *self.unsupported[:_SHOWN]]
        lines += [f"  {node}" for node in shown]
        left_out = len(ranked) + len(self.unsupported) - len(shown)
        if left_out:
            lines.append(f"  and {left_out} more")
        return "\n".join(lines)


def array_difference(a: Any, b: Any) -> tuple[float, float, int]:
    """Largest ``abs(a - b)``, largest finite ``abs(a)``, and how many elements are NaN in one of the two only."""
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):  # PRNG keys of simulated devices
        return (0.0 if bool(np.all(np.asarray(a == b))) else math.inf), 0.0, 0
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf, 0.0, 0
    if not a.size:
        return 0.0, 0.0, 0
    if a.dtype.kind in "iu":  # exact, also where float64 or the type itself could not hold the difference
        gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return float(gap.max()), max(abs(float(a.max())), abs(float(a.min()))), 0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64  # takes bool and the types of ml_dtypes, too
    a, b = a.astype(wide), b.astype(wide)
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    n_nan = int(np.count_nonzero(nan_a != nan_b))
    equal = (a == b) | (nan_a & nan_b)
    with np.errstate(all="ignore"):
        difference = np.where(equal, 0.0, np.abs(a - b))
        sizes = np.abs(a)
    largest = math.inf if n_nan or np.isnan(difference).any() else float(difference.max())
    return largest, float(np.max(sizes, where=np.isfinite(sizes), initial=0.0)), n_nan
