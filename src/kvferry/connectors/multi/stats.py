"""Statistics of a `MultiConnector`: those of each child, by the child's name, and how often each
child failed. Plain data: no method of a child's own class is called after the step that made it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.offloading.metadata import OffloadStats
from kvferry.connectors.stats import KVConnectorStats, TransferStats, add_up, merge_stats

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
    """The sum of all children in `data`, and the numbers of each child."""

    children: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: OwnCounts = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Mapping[str, KVConnectorStats], counts: OwnCounts) -> "MultiStats | None":
        """The numbers of the children by name; None if there are none.

        Those of kvferry's connectors are also summed under the names that a single connector would
        use, so that metrics and dashboards need not know of a `MultiConnector`. Another connector
        may use these names for something else.
        """
        stats = cls(counts=counts)
        for child, part in parts.items():
            row = part.to_dict()
            if isinstance(part, TransferStats | OffloadStats):
                merge_stats(stats.data, row)
            stats.children[child] = {key: row[key] for key in row if key not in _UNSUMMED}
        return None if stats.is_empty() else stats

    def reset(self) -> None:
        self.data, self.children, self.counts = {}, {}, {}

    def aggregate(self, other: KVConnectorStats) -> "MultiStats":
        assert isinstance(other, MultiStats)
        super().aggregate(other)
        add_up(self.children, other.children)
        add_up(self.counts, other.counts)
        return self

    def is_empty(self) -> bool:
        return not (self.data or self.children or self.counts)

    def to_dict(self) -> dict[str, Any]:
        data = {**self.data, **self.counts}
        return {**data, "children": self.children} if self.children else data
