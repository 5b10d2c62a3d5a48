"""Metrics of the router: fast counters, gauges and histograms, exported to Prometheus.

Used on one thread. An update costs a fraction of a microsecond. The classes of prometheus_client
take a lock for each update, which suits many threads, but a router makes a dozen updates per
request.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvferry.router.fleet.instances import Instance, Outcome, Role


class ExportedMetric(Protocol):
    """A metric that `MetricsCollector` can export."""

    def family(self) -> Metric: ...


T = TypeVar("T", bound=ExportedMetric)


class FastCounter:
    """A counter; `add` adds 1 for these values of the labels."""

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
    """A gauge; the owner sets `value`, or `values` if there are labels."""

    __slots__ = ("_help", "_labels", "_name", "value", "values")

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = ()) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self.value = 0.0
        """Current value of a gauge without labels."""
        self.values: dict[tuple[str, ...], float] = {}

    def family(self) -> Metric:
        family = GaugeMetricFamily(self._name, self._help, labels=self._labels)
        for labels, value in self.values.items() if self._labels else [((), self.value)]:
            family.add_metric(labels, value)
        return family


class FastHistogram:
    """A histogram; `bounds` are the upper bounds of the buckets."""

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
    """Exports metrics in the order of registration; a collector of prometheus_client."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._metrics: list[ExportedMetric] = []
        registry.register(self)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> FastCounter:
        return self._register(FastCounter(name, help_text, labels))

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> FastGauge:
        return self._register(FastGauge(name, help_text, labels))

    def histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> FastHistogram:
        return self._register(FastHistogram(name, help_text, bounds))

    def collect(self) -> Iterator[Metric]:
        return (metric.family() for metric in self._metrics)

    def _register(self, metric: T) -> T:
        self._metrics.append(metric)
        return metric


# -- router metrics --
# One registry per router, so several routers in a process stay separate.


_BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


class RouterMetrics:
    """All metrics of one router."""

    def __init__(self, policies: str) -> None:
        """`policies`: names of the routing policies, used as a label."""
        self._policies = policies
        self._urls: dict[Instance, str] = {}
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        collector = MetricsCollector(self._registry)
        self._add_requests(collector)
        self._add_legs(collector)
        self._add_latencies(collector)
        self._add_fleet(collector)

    def _add_requests(self, collector: MetricsCollector) -> None:
        self.requests = collector.counter(
            "kvferry:router_requests",
            "Requests answered, by route and HTTP status.",
            ("route", "status"),
        )
        self.outcomes = collector.counter(
            "kvferry:router_outcomes",
            "Generations, by outcome and by the policies that chose the instances.",
            ("outcome", "policies"),
        )
        self.active = collector.gauge("kvferry:router_active_requests", "Requests being served.")
        self.queued = collector.gauge(
            "kvferry:router_queued_requests", "Requests waiting for admission."
        )

    def _add_legs(self, collector: MetricsCollector) -> None:
        self.failures = collector.counter(
            "kvferry:router_instance_failures",
            "Legs that failed, by role and instance.",
            ("role", "instance"),
        )
        self.refusals = collector.counter(
            "kvferry:router_instance_refusals",
            "Legs answered with 503, by role and instance.",
            ("role", "instance"),
        )
        self.legs = collector.counter(
            "kvferry:router_legs", "Legs that finished.", ("role", "instance", "outcome")
        )
        self.retries = collector.counter(
            "kvferry:router_retries",
            "Legs retried on another instance, by the role that failed.",
            ("role",),
        )
        self.fallbacks = collector.counter(
            "kvferry:router_fallbacks",
            "Prompts that a decode instance computed because no prefill instance was available.",
        )
        self.aborts = collector.counter(
            "kvferry:router_client_aborts", "Requests whose client disconnected early."
        )
        self.releases = collector.counter(
            "kvferry:router_releases", "Prefills whose blocks were released unread."
        )
        self.without_blocks = collector.counter(
            "kvferry:router_prefills_without_blocks",
            "Prefill answers without a ticket, so that D computed the prompt.",
        )
        self.first_tokens = collector.counter(
            "kvferry:router_first_tokens_from_prefill",
            "Answers that began with the token of the prefill instance.",
        )
        self.in_parallel = collector.counter(
            "kvferry:router_legs_at_once", "Requests whose two legs were started together (push)."
        )
        self.turns = collector.counter(
            "kvferry:router_turns",
            "Turns of conversations, by whether the last turn's blocks were offered to P.",
            ("found",),
        )

    def _add_latencies(self, collector: MetricsCollector) -> None:
        self.ttft = collector.histogram(
            "kvferry:router_time_to_first_token_seconds",
            "Seconds from a request's arrival to the first bytes of its answer.",
            _BOUNDS_S,
        )
        self.handover = collector.histogram(
            "kvferry:router_handover_seconds",
            "Seconds from P's answer to the first bytes of D's answer.",
            _BOUNDS_S,
        )

    def _add_fleet(self, collector: MetricsCollector) -> None:
        self.instances = collector.gauge(
            "kvferry:router_instance",
            "1 for each instance and its state.",
            ("role", "instance", "state"),
        )
        self.running = collector.gauge(
            "kvferry:router_instance_legs", "Legs in flight at an instance.", ("role", "instance")
        )
        self.usable = collector.gauge(
            "kvferry:router_usable_instances",
            "Instances that requests can be sent to now, by role; 0 if there is none.",
            ("role",),
        )

    def leg(self, instance: Instance, outcome: Outcome) -> None:
        """Count a leg that has ended."""
        url = self._urls.get(instance)
        if url is None:
            url = self._urls[instance] = instance.url
        self.legs.add(instance.role, url, outcome)

    def outcome(self, outcome: str) -> None:
        """Count a generation that has ended."""
        self.outcomes.add(outcome, self._policies)

    def show_fleet(
        self, members: Iterable[tuple[Instance, str, int]], num_usable: Mapping[Role, int]
    ) -> None:
        """Set the gauges of the fleet from instance, state and running legs of each member."""
        self.usable.values = {(role,): float(number) for role, number in num_usable.items()}
        self.instances.values.clear()
        self.running.values.clear()
        for instance, state, num_running in members:
            self.instances.values[instance.role, instance.url, state] = 1.0
            self.running.values[instance.role, instance.url] = num_running
        # A leg that ends after its instance was removed creates counters for that instance again.
        counted = {labels[:2] for metric in self._by_instance for labels in metric.values}
        for role_and_url in counted - self.running.values.keys():
            self._forget(role_and_url)

    def forget(self, instance: Instance) -> None:
        """Drop the metrics of an instance that has left the fleet, to bound their number."""
        self._urls.pop(instance, None)
        self._forget((instance.role, instance.url))

    @property
    def _by_instance(self) -> tuple[FastCounter, ...]:
        """The counters whose first labels are role and instance."""
        return self.failures, self.refusals, self.legs

    def _forget(self, role_and_url: tuple[str, ...]) -> None:
        for metric in self._by_instance:
            for labels in [labels for labels in metric.values if labels[:2] == role_and_url]:
                del metric.values[labels]

    def text(self) -> bytes:
        return generate_latest(self._registry)
