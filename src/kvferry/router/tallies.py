"""Counters, levels and histograms that cost a fraction of a microsecond, shown to Prometheus when it asks. One thread.

prometheus_client's own take a lock for each addition: they are made for many threads, and a router makes a dozen additions a request.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

__all__ = ["FastCounter", "FastGauge", "FastHistogram", "MetricsCollector"]


class ExportedMetric(Protocol):
    def family(self) -> Metric: ...


T = TypeVar("T", bound=ExportedMetric)


class FastCounter:
    """Only grows. `add` with the values of its labels."""

    __slots__ = ("_help", "_labels", "_name", "values")

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + 1.0

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family


class FastGauge:
    """Goes up and down."""

    __slots__ = ("_help", "_labels", "_name", "value", "values")

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self.value = 0.0
        """Of one without labels."""
        self.values: dict[tuple[str, ...], float] = {}

    def family(self) -> Metric:
        family = GaugeMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self.values.items() if self._labels else [((), self.value)]:
            family.add_metric(labels, value)
        return family


class FastHistogram:
    """How many fell into each bucket; `bounds` are their upper ends."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name, self._help = name, help_text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        total, buckets = 0, []
        for bound, counter in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += counter
            buckets.append((bound, total))
        family = HistogramMetricFamily(self._name, self._help)
        family.add_metric([], buckets, self._sum)
        return family


class MetricsCollector:
    """Shows what it was given, in that order. A collector, as prometheus_client calls it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics: list[ExportedMetric] = []
        registry.register(self)

    def counter(self, name: str, help_text: str, *labels: str) -> FastCounter:
        return self._register(FastCounter(name, help_text, labels))

    def gauge(self, name: str, help_text: str, *labels: str) -> FastGauge:
        return self._register(FastGauge(name, help_text, labels))

    def histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> FastHistogram:
        return self._register(FastHistogram(name, help_text, bounds))

    def collect(self) -> Iterator[Metric]:
        return (metric.family() for metric in self._metrics)

    def _register(self, metric: T) -> T:
        self._metrics.append(metric)
        return metric
