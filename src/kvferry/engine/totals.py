"""What the connectors of an engine have carried since it started, summed over steps and ranks, and for whom last. Pure."""

from bisect import bisect_left
from typing import Any

from kvferry.connectors.stats import HISTOGRAMS, KVConnectorStats, add_up, merge_stats
from kvferry.engine.handovers import TransferLog
from kvferry.engine.messages import TransferSummary

__all__ = ["ConnectorTotals"]


class ConnectorTotals:
    """Numbers add up, at any depth; samples become histograms: {name: {"sum": float, "buckets": {index of the upper bound: count}}}."""

    def __init__(self) -> None:
        self.transfer_log = TransferLog()
        self._data: dict[str, Any] = {}

    def add(self, stats: KVConnectorStats | None) -> None:
        if stats is not None and not stats.is_empty():
            data = stats.to_dict()
            samples = data.pop("samples", {})
            merge_stats(self._data, data)
            for name, values in samples.items():
                for value in values:
                    # Keys are text because the whole crosses to the API process as a message.
                    bucket = str(bisect_left(HISTOGRAMS[name], value))
                    add_up(self._data, {"histograms": {name: {"sum": value, "buckets": {bucket: 1}}}})

    def to_dict(self) -> dict[str, Any]:
        return dict(self._data)

    def summaries(self) -> list[TransferSummary]:
        """One line per transport, as far as the connector tells transports apart."""
        transports = self._data.get("transports", {})
        return [
            TransferSummary(
                transport=name,
                transfers=int(row.get("transfers", 0)),
                total_bytes=int(row.get("bytes", 0)),
                seconds=float(row.get("seconds", 0.0)),
                segments=int(row.get("segments", 0)),
                planned_segments=int(row.get("planned", 0)),
            )
            for name, row in sorted(transports.items())
        ]
