"""GET /metrics of the embedded engine, in the Prometheus text format.

The names are vLLM's where vLLM has the metric (`vllm:*`, and `vllm:nixl_*` for existing
dashboards), else `kvferry:*`. The core's counters are in a `CoreStatus`, which the front-end
requests at each scrape; the latency histograms are in the front-end. Other modules add families
with a `MetricSource`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from kvferry.connectors.multi.stats import CHILD_COUNTERS
from kvferry.connectors.offloading.metadata import LOOKUP_COUNTERS, TIER_COUNTERS, TIER_LEVELS
from kvferry.connectors.stats import (
    COUNTERS,
    HISTOGRAMS,
    LEVELS,
    MODE_HELP,
    MODE_METRIC,
    NIXL_COUNTERS,
    SIDE_CHANNEL_HELP,
    SIDE_CHANNEL_METRIC,
)
from kvferry.engine.api.assembly import Delta
from kvferry.engine.messages import CoreStatus


def transfer_families(status: CoreStatus, model_name: str) -> Iterator[Metric]:
    """Yield the connector's counters, gauges and histograms; nothing for an engine without a
    connector.
    """
    stats = status.connector_stats
    if not stats and not status.transfers:
        return
    yield from _transport_families(status)
    for name, help_text in COUNTERS.items():
        if name != "transfers":
            yield _counter(f"kvferry:{name}", help_text, stats.get(name, 0), model_name)
    for name, help_text in LEVELS.items():
        level = GaugeMetricFamily(f"kvferry:{name}", help_text, labels=["model_name"])
        level.add_metric([model_name], sum(stats.get("levels", {}).get(name, {}).values()))
        yield level
    if SIDE_CHANNEL_METRIC in stats:
        where = GaugeMetricFamily(
            f"kvferry:{SIDE_CHANNEL_METRIC}", SIDE_CHANNEL_HELP, labels=["model_name", "address"]
        )
        where.add_metric([model_name, stats[SIDE_CHANNEL_METRIC]], 1)
        yield where
    for name, parts in NIXL_COUNTERS.items():
        yield _counter(
            f"vllm:nixl_{name}",
            "Same metric as in vLLM.",
            sum(stats.get(part, 0) for part in parts),
            model_name,
        )
    for name, observed in stats.get("histograms", {}).items():
        yield _histogram(name, observed, model_name)
    for name, help_text in CHILD_COUNTERS.items():
        if name in stats:
            by_child = CounterMetricFamily(
                f"kvferry:{name}", help_text, labels=["model_name", "child"]
            )
            for child, count in stats[name].items():
                by_child.add_metric([model_name, child], count)
            yield by_child


def offload_families(status: CoreStatus, model_name: str) -> Iterator[Metric]:
    """Yield the counters and gauges of the storage tiers; nothing for an engine without tiers."""
    stats = status.connector_stats
    tiers: Mapping[str, Mapping[str, float]] = stats.get("tiers", {})
    levels: Mapping[str, Mapping[str, float]] = stats.get("levels", {})
    names = sorted({*tiers, *(key.split(" ")[0] for key in levels if " " in key)})
    if not names:
        return
    for name, help_text in LOOKUP_COUNTERS.items():
        value = stats.get("lookups", {}).get(name, 0)
        yield _counter(f"kvferry:offload_{name}", help_text, value, model_name)
    for name, help_text in TIER_COUNTERS.items():
        counts: dict[tuple[str, ...], float] = {
            (model_name, tier): tiers.get(tier, {}).get(name, 0) for tier in names
        }
        labels = ["model_name", "tier"]
        yield _labelled(
            CounterMetricFamily(f"kvferry:tier_{name}", help_text, labels=labels), counts
        )
    for name, help_text in TIER_LEVELS.items():
        values: dict[tuple[str, ...], float] = {
            (model_name, tier): sum(levels.get(f"{tier} {name}", {}).values()) for tier in names
        }
        labels = ["model_name", "tier"]
        yield _labelled(GaugeMetricFamily(f"kvferry:tier_{name}", help_text, labels=labels), values)


def _transport_families(status: CoreStatus) -> Iterator[Metric]:
    """Yield counters with one sample per data transport."""
    for name, field, help_text in (
        ("kvferry:transfers", "transfers", "Transfers by data transport."),
        ("kvferry:transfer_bytes", "total_bytes", "Bytes moved by data transport."),
        ("kvferry:transfer_seconds", "seconds", "Time spent moving bytes by data transport."),
        ("kvferry:transfer_segments", "segments", "Descriptors or copies used by data transport."),
        (
            "kvferry:transfer_planned_segments",
            "planned_segments",
            "Segments requested by data transport, before adjacent ones were joined.",
        ),
    ):
        family = CounterMetricFamily(name, help_text, labels=["transport"])
        for summary in status.transfers:
            family.add_metric([summary.transport], getattr(summary, field))
        yield family


def _counter(name: str, help_text: str, value: float, model_name: str) -> Metric:
    family = CounterMetricFamily(name, help_text, labels=["model_name"])
    family.add_metric([model_name], value)
    return family


def _histogram(name: str, observed: Mapping[str, Any], model_name: str) -> Metric:
    bounds = HISTOGRAMS[name]
    # The connector counts each bucket alone; Prometheus wants cumulative counts.
    counts = accumulate(observed["buckets"].get(str(index), 0) for index in range(len(bounds) + 1))
    buckets = list(zip([*(str(bound) for bound in bounds), "+Inf"], counts, strict=True))
    family = HistogramMetricFamily(
        f"vllm:nixl_{name}", "Same metric as in vLLM.", labels=["model_name"]
    )
    family.add_metric([model_name], buckets, observed["sum"])
    return family


# -- front-end metrics --
# The latency histograms, the core's counters and the text output.


MetricSource = Callable[[CoreStatus, str], Iterable[Metric]]
"""A function that makes families from a status, for the named model; called at each scrape.

The function must return quickly, because the function runs on the event loop.
"""

_FIRST_TOKEN_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_LATENCY_BUCKETS_S = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)


class ApiMetrics:
    """Holds the front-end's own histograms and writes all families as text."""

    def __init__(
        self, model_name: str, sources: Sequence[MetricSource] = (), transfer_mode: str = ""
    ) -> None:
        self._model_name = model_name
        self._sources = (engine_families, transfer_families, offload_families, *sources)
        self._registry = CollectorRegistry()
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds",
            "Time to a choice's first token.",
            _FIRST_TOKEN_BUCKETS_S,
        )
        if transfer_mode:
            mode = Gauge(
                f"kvferry:{MODE_METRIC}", MODE_HELP, ["model_name", "mode"], registry=self._registry
            )
            mode.labels(model_name, transfer_mode).set(1)
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time to a choice's last token.", _LATENCY_BUCKETS_S
        )

    def timer(self) -> "RequestTimer":
        """Return a timer for one HTTP request; the timer starts now."""
        return RequestTimer(self._first_token, self._latency)

    def render(self, status: CoreStatus | None) -> bytes:
        """Return all families as text; without a status (the core does not answer), only the
        front-end's.
        """
        families = (
            []
            if status is None
            else [family for source in self._sources for family in source(status, self._model_name)]
        )
        return generate_latest(_Families(families)) + generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            name, help_text, ["model_name"], registry=self._registry, buckets=buckets
        )
        return family.labels(model_name=self._model_name)


class RequestTimer:
    """Measures the latencies of the choices of one HTTP request."""

    def __init__(self, first_token: Histogram, latency: Histogram) -> None:
        self._first_token = first_token
        self._latency = latency
        self._started = time.monotonic()
        self._begun: set[int] = set()

    def observe(self, delta: Delta) -> None:
        elapsed_s = time.monotonic() - self._started
        if delta.tokens and delta.index not in self._begun:
            self._begun.add(delta.index)
            self._first_token.observe(elapsed_s)
        if delta.finish_reason is not None:
            self._latency.observe(elapsed_s)


def engine_families(status: CoreStatus, model_name: str) -> Iterator[Metric]:
    """Yield the counters and gauges of the engine core."""
    usage = status.num_used_blocks / status.num_blocks if status.num_blocks else 0.0
    gauges: dict[str, tuple[str, float]] = {
        "vllm:num_requests_running": ("Requests in the running batch.", status.num_running),
        "vllm:num_requests_waiting": (
            "Requests waiting to be scheduled or for remote KV.",
            status.num_waiting,
        ),
        "kvferry:num_requests_waiting_for_remote_kvs": (
            "Requests whose KV is being transferred.",
            status.num_waiting_for_remote_kvs,
        ),
        "vllm:kv_cache_usage_perc": ("Used part of the KV cache; 1 is all of it.", usage),
        "kvferry:num_blocks": ("Blocks in the KV cache.", status.num_blocks),
        "kvferry:num_used_blocks": ("Blocks held by a request or a lease.", status.num_used_blocks),
        "kvferry:num_delayed_frees": (
            "Finished requests whose blocks a peer may still read.",
            status.num_delayed_frees,
        ),
        "kvferry:device_memory_bytes": (
            "GPU memory that rank 0 holds through torch; 0 on CPUs.",
            status.device_bytes,
        ),
    }
    counters: dict[str, tuple[str, float]] = {
        "vllm:prompt_tokens": ("Prompt tokens processed.", status.prompt_tokens_total),
        "vllm:generation_tokens": ("Tokens generated.", status.generation_tokens_total),
        "vllm:num_preemptions": ("Preemptions.", status.preemptions_total),
    }
    for name, (help_text, value) in gauges.items():
        yield _labelled(
            GaugeMetricFamily(name, help_text, labels=["model_name"]), {(model_name,): value}
        )
    for name, (help_text, value) in counters.items():
        yield _labelled(
            CounterMetricFamily(name, help_text, labels=["model_name"]), {(model_name,): value}
        )
    by_source: dict[tuple[str, ...], float] = {
        (model_name, source): count for source, count in status.prompt_tokens_by_source.items()
    }
    yield _labelled(
        CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by the source of their KV.",
            labels=["model_name", "source"],
        ),
        by_source,
    )
    by_reason: dict[tuple[str, ...], float] = {
        (model_name, reason): count for reason, count in status.requests_finished_by_reason.items()
    }
    yield _labelled(
        CounterMetricFamily(
            "vllm:request_success",
            "Finished requests by reason.",
            labels=["model_name", "finished_reason"],
        ),
        by_reason,
    )


Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def _labelled(family: Family, samples: Mapping[tuple[str, ...], float]) -> Family:
    for labels, value in samples.items():
        family.add_metric(list(labels), value)
    return family


class _Families:
    """A collector for `generate_latest`, holding families that were made for one scrape."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
