"""What the connector has carried, as Prometheus families: `kvferry:*` per transport, and vLLM's `vllm:nixl_*` names for existing
dashboards.
"""

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvferry.connectors.stats import COUNTERS, HISTOGRAMS, LEVELS, NIXL_COUNTERS, SIDE_CHANNEL_HELP, SIDE_CHANNEL_METRIC
from kvferry.engine.messages import CoreStatus

__all__ = ["transfer_families"]


def transfer_families(status: CoreStatus, model_name: str) -> Iterator[Metric]:
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
        where = GaugeMetricFamily(f"kvferry:{SIDE_CHANNEL_METRIC}", SIDE_CHANNEL_HELP, labels=["model_name", "address"])
        where.add_metric([model_name, stats[SIDE_CHANNEL_METRIC]], 1)
        yield where
    for name, parts in NIXL_COUNTERS.items():
        yield _counter(f"vllm:nixl_{name}", "As in vLLM.", sum(stats.get(part, 0) for part in parts), model_name)
    for name, observed in stats.get("histograms", {}).items():
        yield _histogram(name, observed, model_name)


def _transport_families(status: CoreStatus) -> Iterator[Metric]:
    for name, field, help_text in (
        ("kvferry:transfers", "transfers", "Transfers by data transport."),
        ("kvferry:transfer_bytes", "total_bytes", "Bytes moved by data transport."),
        ("kvferry:transfer_seconds", "seconds", "Time spent moving bytes by data transport."),
        ("kvferry:transfer_segments", "segments", "Descriptors or copies used by data transport."),
        ("kvferry:transfer_planned_segments", "planned_segments", "Segments asked for by data transport, before neighbours were joined."),
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
    counts = accumulate(observed["buckets"].get(str(index), 0) for index in range(len(bounds) + 1))
    buckets = list(zip([*(str(bound) for bound in bounds), "+Inf"], counts, strict=True))
    family = HistogramMetricFamily(f"vllm:nixl_{name}", "As in vLLM.", labels=["model_name"])
    family.add_metric([model_name], buckets, observed["sum"])
    return family
