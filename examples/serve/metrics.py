"""What `/metrics` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .texts import Writing

__all__ = ["Metrics", "Value", "Values"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server, in a registry of its own.

    Attributes:
        refused: requests that were told to come again later, by what they wanted.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "aiopipe_requests", "Requests, by address and answer.", ["path", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "aiopipe_request_seconds",
            "From a request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.refused = Counter(
            "aiopipe_refused", "Requests that were refused because too much was waiting.", ["what"],
            registry=self.registry,
        )  # fmt: skip
        self._tokens = Counter("aiopipe_tokens", "Tokens of texts, by kind.", ["kind"], registry=self.registry)
        self._first = Histogram(
            "aiopipe_first_token_seconds",
            "From a text's request to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def answered(self, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def text_ended(self, writing: Writing) -> None:
        """A text is complete, or nobody wants it any more."""
        usage = writing.usage
        if writing.first_token_s is not None:
            self._first.observe(writing.first_token_s)
            self._tokens.labels("prompt").inc(usage["prompt_tokens"])
            self._tokens.labels("written").inc(usage["completion_tokens"])

    def show(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class Value(NamedTuple):
    """Something that is read when somebody asks.

    Attributes:
        name: what it is called.
        what: it is.
        kind: whether it only grows.
        values: by label; under "" where there is none.
        label: what the values are told apart by.
    """

    name: str
    what: str
    kind: Literal["gauge", "counter"]
    values: Mapping[str, float]
    label: str = ""


class Values(Collector):
    """Has `/metrics` show what is read when it is asked for.

    Args:
        metrics: where it appears.
        read: what there is now.
    """

    def __init__(self, metrics: Metrics, read: Callable[[], Iterable[Value]]) -> None:
        self._read = read
        metrics.registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing is read for a description."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The values."""
        for value in self._read():
            family: Any = GaugeMetricFamily if value.kind == "gauge" else CounterMetricFamily
            metric = family(value.name, value.what, labels=[value.label] if value.label else [])
            for key, number in value.values.items():
                metric.add_metric([key] if value.label else [], number)
            yield metric
