"""The statistics of `OffloadingConnector` in vLLM's classes.

Figures that vLLM's own OffloadingConnector has keep vLLM's names (`vllm:kv_offload_*`) for existing
dashboards; the others are named `kvferry:tier_*` and `kvferry:offload_*`.
"""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.connectors.offloading.metadata import (
    LOOKUP_COUNTERS,
    TIER_COUNTERS,
    TIER_LEVELS,
    OffloadStats,
)
from kvferry.tiers.commands import POOL

POOL_NAMES = {
    "kv_offload_load_bytes": "loaded_bytes",
    "kv_offload_load_time": "load_seconds",
    "kv_offload_store_bytes": "stored_bytes",
    "kv_offload_store_time": "store_seconds",
    "kv_offload_allocation_failure": "dropped_stores",
}
"""vLLM's names for copies between the cache and host memory, and the pool's counters."""
TIERING_NAMES = {
    "kv_offload_tiering_read_bytes": "loaded_bytes",
    "kv_offload_tiering_read_time": "load_seconds",
    "kv_offload_tiering_write_bytes": "stored_bytes",
    "kv_offload_tiering_write_time": "store_seconds",
    "kv_offload_tiering_promotion_job_failures": "failed_loads",
    "kv_offload_tiering_cascade_job_failures": "failed_stores",
    "kv_offload_tiering_chunk_hits": "loads",
}
"""vLLM's names, with a label `tier`, for tiers behind host memory, and the tiers' counters."""
_SAME = "Same metric as in vLLM."


class OffloadVllmStats(OffloadStats, KVConnectorStats):
    """`OffloadStats` under vLLM's base class."""


class OffloadPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics with vLLM's front-end and feeds stats into them."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        by_tier = [*labelnames, "tier"]
        self._lookups = {
            name: counter(name=f"kvferry:offload_{name}", documentation=text, labelnames=labelnames)
            for name, text in LOOKUP_COUNTERS.items()
        }
        self._tiers = {
            name: counter(name=f"kvferry:tier_{name}", documentation=text, labelnames=by_tier)
            for name, text in TIER_COUNTERS.items()
        }
        self._levels = {
            name: gauge(
                name=f"kvferry:tier_{name}",
                documentation=text,
                labelnames=by_tier,
                multiprocess_mode="mostrecent",
            )
            for name, text in TIER_LEVELS.items()
        }
        self._pool = {
            name: counter(name=f"vllm:{name}", documentation=_SAME, labelnames=labelnames)
            for name in POOL_NAMES
        }
        self._tiering = {
            name: counter(name=f"vllm:{name}", documentation=_SAME, labelnames=by_tier)
            for name in TIERING_NAMES
        }
        self._known: dict[tuple[int, str], dict[str, int]] = {}
        # Metrics that have never been incremented show 0 instead of being absent.
        for metrics in (self._lookups, self._pool):
            for metric in metrics.values():
                for labels in per_engine_labelvalues.values():
                    metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, labels = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for name, value in data.get("lookups", {}).items():
            self._lookups[name].labels(*labels).inc(value)
        for tier, row in data.get("tiers", {}).items():
            for name, value in row.items():
                self._tiers[name].labels(*labels, tier).inc(value)
            if tier == POOL:
                for name, ours in POOL_NAMES.items():
                    self._pool[name].labels(*labels).inc(row.get(ours, 0))
            else:
                for name, ours in TIERING_NAMES.items():
                    self._tiering[name].labels(*labels, tier).inc(row.get(ours, 0))
        for key, latest in data.get("levels", {}).items():
            tier, level = key.split(" ", 1)
            # Ranks report the levels of each tier once before anything happens to the tier. From
            # then on its counters show 0: an alert does not see that a counter appears.
            for metric in self._tiers.values():
                metric.labels(*labels, tier)
            known = self._known.setdefault((engine_idx, key), {})
            known.update(latest)
            self._levels[level].labels(*labels, tier).set(sum(known.values()))
