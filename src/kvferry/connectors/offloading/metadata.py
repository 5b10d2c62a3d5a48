"""The messages between the two sides of `OffloadingConnector`, and its
statistics. Plain data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.connectors.stats import KVConnectorStats, add_up
from kvferry.tiers.base import TierUsage
from kvferry.tiers.commands import ContentsChanged, LoadEnded, OffloadCommand, TierCounts

# -- messages --


@dataclass(frozen=True, slots=True)
class EndStores:
    """The request has finished: give its blocks back when no copy reads the blocks of any store up
    to this number any more.
    """

    request: str
    number: int


@dataclass(frozen=True, slots=True)
class OffloadingMetadata(KVConnectorMetadata):
    """The commands of one step for every rank, in order."""

    commands: tuple[OffloadCommand | EndStores, ...] = ()
    timed_step: int | None = None
    """The number of the step if the scheduler measures how long the step takes."""


@dataclass(frozen=True, slots=True)
class OffloadingHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What the scheduler must know to look up the entries of one rank."""

    tp_rank: int
    factors: Mapping[str, Any]
    """The factors of the rank's namespace."""
    row_bytes: tuple[int, ...]
    """The size of a chunk in each KV-cache group."""


@dataclass(slots=True)
class OffloadingWorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks report to the scheduler besides finished transfers."""

    loads: list[LoadEnded] = field(default_factory=list)
    """The loads that ranks have ended."""
    copied: dict[int, int] = field(default_factory=dict)
    """By rank: no copy reads the blocks of any store up to this number (`StoresCopied`)."""
    timed_step: int | None = None
    """The step that has ended, if the scheduler measures it."""
    busy: dict[int, bool] = field(default_factory=dict)
    """By rank: whether it still stores or loads, if that has changed."""
    contents: list[tuple[int, ContentsChanged]] = field(default_factory=list)
    """What ranks have reported of their tiers, the reports of each rank in order."""

    @property
    def is_empty(self) -> bool:
        parts = (self.loads, self.copied, self.busy, self.contents)
        return not any(parts) and self.timed_step is None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "OffloadingWorkerMetadata":
        """Of two reports of one rank, `other` is the later: vLLM may pass on the report of a step
        that has failed with that of the next step.
        """
        assert isinstance(other, OffloadingWorkerMetadata)
        return OffloadingWorkerMetadata(
            [*self.loads, *other.loads],
            self.copied | other.copied,
            self.timed_step if other.timed_step is None else other.timed_step,
            self.busy | other.busy,
            [*self.contents, *other.contents],
        )


# -- statistics --

TIER_COUNTERS: Mapping[str, str] = {
    "loads": "Chunks loaded from the tier.",
    "loaded_bytes": "Bytes loaded from the tier.",
    "misses": "Chunks that a lookup found in the tier, but that were gone when they were loaded.",
    "refused": "Stored chunks that were damaged, forged or of another engine, and were not used.",
    "failed_loads": "Chunks that could not be read because the storage failed or did not answer.",
    "load_seconds": "Time spent loading, summed over parallel loads.",
    "failed_lookups": "Requests for which the tier could not say what it holds, because it failed.",
    "stores": "Chunks stored in the tier.",
    "stored_bytes": "Bytes stored in the tier.",
    "store_seconds": "Time spent storing, summed over parallel stores.",
    "failed_stores": "Chunks that could not be stored because the storage failed.",
    "dropped_stores": "Chunks that were not stored because the tier was busy, full or failing.",
    "evictions": "Chunks that the tier has evicted.",
}
"""Counters of each tier, over all ranks."""

TIER_LEVELS: Mapping[str, str] = {
    "used_bytes": "Bytes that the tier holds, as far as this engine knows.",
    "max_bytes": "The size of the tier; 0 if only the storage bounds it.",
    "objects": "Chunks that the tier holds, as far as this engine knows.",
}

LOOKUP_COUNTERS: Mapping[str, str] = {
    "queried_tokens": "Prompt tokens that were looked up in the tiers.",
    "hit_tokens": "Prompt tokens whose KV was found in the tiers and was loaded.",
    "skipped_tokens": "Prompt tokens found in the tiers, but computed because that was faster.",
    "failed_loads": "Requests whose load failed, so that their prompt was computed.",
    "lookup_timeouts": "Requests that did not wait any longer for a tier's answer.",
}


class OffloadStats(KVConnectorStats):
    """Counters of the lookups and of each tier.

    data: {"lookups": {counter: int}, "tiers": {tier: {counter: number}},
           "levels": {"tier level": {"reporter": value}}}
    """

    def count(self, counter: str, by: float = 1) -> None:
        assert counter in LOOKUP_COUNTERS
        lookups = self.data.setdefault("lookups", {})
        lookups[counter] = lookups.get(counter, 0) + by

    def add_tiers(self, counts: TierCounts) -> None:
        if counts:
            add_up(self.data, {"tiers": counts})

    def set_usage(self, reporter: str, tier: str, usage: TierUsage) -> None:
        values = (usage.used_bytes, usage.max_bytes or 0, usage.num_entries)
        for level, value in zip(TIER_LEVELS, values, strict=True):
            levels = self.data.setdefault("levels", {})
            levels.setdefault(f"{tier} {level}", {})[reporter] = value

    def reduce(self) -> dict[str, int | float]:
        """One figure per tier and direction, for the log line."""
        lookups = self.data.get("lookups", {})
        queried, hit = lookups.get("queried_tokens", 0), lookups.get("hit_tokens", 0)
        shown: dict[str, int | float] = {
            "Tokens looked up": queried,
            "Tokens from tiers": hit,
        }
        for tier, row in sorted(self.data.get("tiers", {}).items()):
            shown[f"MB from {tier}"] = round(row.get("loaded_bytes", 0) / 2**20, 1)
            shown[f"MB to {tier}"] = round(row.get("stored_bytes", 0) / 2**20, 1)
            if row.get("refused"):
                shown[f"Refused from {tier}"] = int(row["refused"])
        return shown
