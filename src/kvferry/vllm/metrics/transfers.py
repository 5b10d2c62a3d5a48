"""The connector's statistics in vLLM's classes: stats that cross vLLM's processes, and Prometheus
metrics in vLLM's front-end.

The metrics keep vLLM's names (`vllm:nixl_*`) for existing dashboards; values that vLLM's connector
does not count are named `kvferry:*`.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.connectors.stats import (
    COUNTERS,
    HISTOGRAMS,
    LEVELS,
    MODE_HELP,
    MODE_METRIC,
    NIXL_COUNTERS,
    SIDE_CHANNEL_HELP,
    SIDE_CHANNEL_METRIC,
    TransferStats,
)

_TRANSPORT_COUNTERS = {
    "transfers": ("transfers", "Transfers by data transport."),
    "bytes": ("transfer_bytes", "Bytes moved by data transport."),
    "seconds": ("transfer_seconds", "Time spent moving bytes by data transport."),
    "segments": ("transfer_segments", "Descriptors or copies used by data transport."),
    "planned": (
        "transfer_planned_segments",
        "Segments requested by data transport, before adjacent ones were joined.",
    ),
}
_NIXL_ALWAYS_ZERO = ("num_failed_notifications", "num_notifications_after_expiry")
"""Failures of vLLM's connector that kvferry cannot have: kvferry sends no notifications, and never
uses a read that ended after expiry.
"""
_SAME = "Same metric as in vLLM."


class KVFerryStats(TransferStats, KVConnectorStats):
    """`TransferStats` under vLLM's base class."""


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics with vLLM's front-end and feeds stats into them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        transfer_mode: str,
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)

        def make(kind: type, name: str, text: str, *labels: str, **settings: Any) -> Any:
            if kind is Gauge:
                settings["multiprocess_mode"] = "mostrecent"
            names = [*labelnames, *labels]
            return metric_types[kind](name=name, documentation=text, labelnames=names, **settings)

        self._counters = {
            name: make(Counter, f"kvferry:{name}", text)
            for name, text in COUNTERS.items()
            if name != "transfers"
        }
        self._nixl_counters = {
            name: make(Counter, f"vllm:nixl_{name}", _SAME)
            for name in (*NIXL_COUNTERS, *_NIXL_ALWAYS_ZERO)
        }
        self._gauges = {name: make(Gauge, f"kvferry:{name}", text) for name, text in LEVELS.items()}
        self._histograms = {
            name: make(Histogram, f"vllm:nixl_{name}", _SAME, buckets=buckets)
            for name, buckets in HISTOGRAMS.items()
        }
        self._by_transport = {
            field: make(Counter, f"kvferry:{name}", text, "transport")
            for field, (name, text) in _TRANSPORT_COUNTERS.items()
        }
        self._side_channel = make(
            Gauge, f"kvferry:{SIDE_CHANNEL_METRIC}", SIDE_CHANNEL_HELP, "address"
        )
        self._levels: dict[tuple[int, str], dict[str, int]] = {}
        mode = make(Gauge, f"kvferry:{MODE_METRIC}", MODE_HELP, "mode")
        for labels in per_engine_labelvalues.values():
            mode.labels(*labels, transfer_mode).set(1)
            # Metrics that have never been incremented show 0 instead of being absent.
            for metrics in (self._counters, self._nixl_counters, self._gauges, self._histograms):
                for metric in metrics.values():
                    metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, labels = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            _add(counter, labels, data.get(name, 0))
        for name, parts in NIXL_COUNTERS.items():
            _add(self._nixl_counters[name], labels, sum(data.get(part, 0) for part in parts))
        for name, values in data.get("samples", {}).items():
            for value in values:
                self._histograms[name].labels(*labels).observe(value)
        for name, latest in data.get("levels", {}).items():
            known = self._levels.setdefault((engine_idx, name), {})
            known.update(latest)
            self._gauges[name].labels(*labels).set(sum(known.values()))
        if SIDE_CHANNEL_METRIC in data:
            self._side_channel.labels(*labels, data[SIDE_CHANNEL_METRIC]).set(1)
        for transport, row in data.get("transports", {}).items():
            for field, family in self._by_transport.items():
                _add(family, [*labels, transport], row.get(field, 0))


def _add(counter: Any, labels: list[object], value: float) -> None:
    if value:
        counter.labels(*labels).inc(value)
