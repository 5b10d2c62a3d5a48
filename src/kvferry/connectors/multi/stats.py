"""Statistics of a `MultiConnector`: those of each child, by the child's name, and how often each
child failed. Plain data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.stats import KVConnectorStats, add_up, merge_stats

__all__ = ["CHILD_COUNTERS", "MultiStats", "OwnCounts"]

CHILD_COUNTERS: Mapping[str, str] = {
    "child_failures": "Exceptions of a child of MultiConnector, which other children survived.",
    "child_failed_loads": "Loads of a child of MultiConnector that failed.",
    "child_slow_calls": "Calls and lookups of a child of MultiConnector that took over 1 s.",
    "child_lookup_timeouts": "Requests that a child of MultiConnector kept waiting for too long.",
    "child_disabled": "1 for a child of MultiConnector that was disabled because it failed.",
}
"""What a `MultiConnector` counts itself, by the name of the child."""

OwnCounts = dict[str, dict[str, int]]
"""The counters of `CHILD_COUNTERS`, each by child."""

_UNSUMMED = ("samples", "levels")
"""What `add_up` cannot sum over the life of an engine."""


@dataclass
class MultiStats(KVConnectorStats):
    """The stats of each child, in `parts`; `data` is unused."""

    parts: dict[str, KVConnectorStats] = field(default_factory=dict)
    counts: OwnCounts = field(default_factory=dict)

    def reset(self) -> None:
        self.parts, self.counts = {}, {}

    def aggregate(self, other: KVConnectorStats) -> "MultiStats":
        assert isinstance(other, MultiStats)
        for name, part in other.parts.items():
            known = self.parts.get(name)
            self.parts[name] = part if known is None else known.aggregate(part)
        add_up(self.counts, other.counts)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The numbers of a log line, each with the child's name."""
        return {
            f"{child}: {name}": value
            for child, part in self.parts.items()
            for name, value in part.reduce().items()
        }

    def is_empty(self) -> bool:
        return not self.counts and all(part.is_empty() for part in self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """The numbers under the names that a single connector would use, so that metrics and
        dashboards need not know of a `MultiConnector`; and those of each child under `children`.
        """
        data: dict[str, Any] = {}
        children: dict[str, dict[str, Any]] = {}
        for child, part in self.parts.items():
            row = part.to_dict()
            merge_stats(data, row)
            children[child] = {key: row[key] for key in row if key not in _UNSUMMED}
        data.update(self.counts)
        if children:
            data["children"] = children
        return data
