"""Statistics of connectors: what one rank counts between two steps, summed over ranks and time, and shown to Prometheus.

`KVConnectorStats` and `KVConnectorPromMetrics` are the contract's names; a connector brings its own subclasses.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["COUNTERS", "HISTOGRAMS", "KVConnectorPromMetrics", "KVConnectorStats", "TransferStats", "add_up"]

COUNTERS: Mapping[str, str] = {
    "transfers": "Transfers that ended well.",
    "failed_transfers": "Transfers that a plane could not finish, cancelled ones included.",
    "failed_handshakes": "Peers that could not be reached or were lost.",
    "finished_pulls": "Requests whose KV arrived and was confirmed.",
    "failed_pulls": "Requests whose KV did not arrive or was not confirmed.",
    "kv_expired_reqs": "Leases that ran out before anybody confirmed a read.",
    "dropped_messages": "Messages from peers that were malformed or out of place.",
    "rejected_params": "Requests whose kv_transfer_params could not be honoured.",
}

HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "xfer_time_seconds": (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
    "post_time_seconds": (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0),
    "bytes_transferred": tuple(float(2**power) for power in range(11, 34, 2)),
    "num_descriptors": (10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10_000.0, 20_000.0, 50_000.0),
}
"""Upper bounds of the buckets; vLLM's, with finer ones below for same-host planes."""


@dataclass
class KVConnectorStats:
    """A bag of numbers that can be added up."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "KVConnectorStats") -> "KVConnectorStats":
        raise NotImplementedError

    def reduce(self) -> dict[str, int | float]:
        """A few telling numbers for a log line."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        return not self.data

    def to_dict(self) -> dict[str, Any]:
        return dict(self.data)


class KVConnectorPromMetrics:
    """Registers metrics once and observes stats. Subclasses say which."""

    def __init__(
        self,
        metric_types: Mapping[type, type],
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._metric_types = metric_types
        self._labelnames = labelnames
        self._per_engine_labelvalues = per_engine_labelvalues

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        raise NotImplementedError


@dataclass
class TransferStats(KVConnectorStats):
    """Counters, what each plane carried, and histograms. Everything in it is a number in nested dicts, so two of them simply add up.

    data: {counter: int, "planes": {plane: {"transfers", "bytes", "seconds", "pieces"}},
           "histograms": {name: {"sum": float, "buckets": {index of the upper bound, as text: count}}}}
    """

    def count(self, counter: str, by: int = 1) -> None:
        assert counter in COUNTERS
        self.data[counter] = self.data.get(counter, 0) + by

    def record_transfer(self, plane: str, total_bytes: int, pieces: int, post_s: float, transfer_s: float) -> None:
        row = {"transfers": 1, "bytes": total_bytes, "seconds": transfer_s, "pieces": pieces}
        samples = {
            "xfer_time_seconds": transfer_s,
            "post_time_seconds": post_s,
            "bytes_transferred": total_bytes,
            "num_descriptors": pieces,
        }
        observed = {name: {"sum": value, "buckets": {_bucket(name, value): 1}} for name, value in samples.items()}
        add_up(self.data, {"transfers": 1, "planes": {plane: row}, "histograms": observed})

    def aggregate(self, other: KVConnectorStats) -> "TransferStats":
        """Add another rank's or step's numbers to these."""
        add_up(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        planes = self.data.get("planes", {}).values()
        transfers = self.data.get("transfers", 0)
        moved = sum(row["bytes"] for row in planes) / 2**20
        seconds = sum(row["seconds"] for row in planes)
        return {
            "Num successful transfers": transfers,
            "Avg xfer time (ms)": round(1e3 * seconds / transfers, 3) if transfers else 0,
            "Avg MB per transfer": round(moved / transfers, 3) if transfers else 0,
            "Throughput (MB/s)": round(moved / seconds, 3) if seconds else 0,
            "Avg number of descriptors": round(sum(row["pieces"] for row in planes) / transfers, 1) if transfers else 0,
            "Num failed transfers": self.data.get("failed_transfers", 0),
            "Num KV expired reqs": self.data.get("kv_expired_reqs", 0),
        }


def _bucket(name: str, value: float) -> str:
    return str(bisect_left(HISTOGRAMS[name], value))


def add_up(into: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Add numbers to numbers of the same name, at any depth; of anything else the latest is kept."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            add_up(into.setdefault(name, {}), value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            into[name] = into.get(name, 0) + value
        else:
            into[name] = value
