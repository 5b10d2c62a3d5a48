"""The storage tiers of one instance: what its `/metrics` page says, and the growth of its counters
over the last minute.

Pure: the caller passes `now` (local monotonic seconds). A value missing from the page is None.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

WINDOW_S = 60.0
"""Seconds over which growth is measured, as in the headline of the dashboard."""
MAX_READINGS = 256
"""Most readings that are kept; with more than four probes per second the window is shorter."""


class LookupCounters(NamedTuple):
    """Prompt tokens since the engine started."""

    queried_tokens: float | None = None
    """Tokens that were not in the engine's own cache and were looked up in the tiers."""
    hit_tokens: float | None = None
    """Tokens whose KV was loaded from the tiers."""
    skipped_tokens: float | None = None
    """Tokens found in the tiers, but computed because that was faster."""


class TierCounters(NamedTuple):
    """Counters of one tier since the engine started."""

    loaded_bytes: float | None = None
    stored_bytes: float | None = None
    evictions: float | None = None
    refused: float | None = None
    """Chunks that were damaged, forged or of another engine, and were not used."""
    failed_loads: float | None = None
    failed_stores: float | None = None
    dropped_stores: float | None = None


class TierLevels(NamedTuple):
    """What one tier holds, as far as the engine knows."""

    used_bytes: float | None = None
    max_bytes: float | None = None
    """0 if only the storage bounds the tier."""
    objects: float | None = None


@dataclass(frozen=True, slots=True)
class TierReading:
    """One tier on a page."""

    levels: TierLevels
    counters: TierCounters


@dataclass(frozen=True, slots=True)
class OffloadReading:
    """All tiers on a page."""

    lookups: LookupCounters
    tiers: Mapping[str, TierReading]


@dataclass(frozen=True, slots=True)
class OffloadGrowth:
    """Growth of the counters between two readings of one incarnation; by default unknown."""

    over_s: float = 0.0
    """Seconds between the two readings."""
    lookups: LookupCounters = field(default_factory=LookupCounters)
    tiers: Mapping[str, TierCounters] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Share of the looked-up tokens that came from the tiers, 0 to 1."""
        return _share(self.lookups.hit_tokens, self.lookups.queried_tokens)

    def load_share(self, tier: str) -> float | None:
        """Share of the loaded bytes that came from this tier, 0 to 1."""
        total = sum(counters.loaded_bytes or 0.0 for counters in self.tiers.values())
        return _share(self.of(tier).loaded_bytes, total)

    def of(self, tier: str) -> TierCounters:
        return self.tiers.get(tier, TierCounters())

    def per_s(self, grown: float | None) -> float | None:
        return grown / self.over_s if grown is not None and self.over_s > 0 else None


@dataclass(slots=True)
class OffloadWindow:
    """The readings of one instance in the last minute."""

    _readings: deque[tuple[float, OffloadReading]] = field(
        default_factory=lambda: deque(maxlen=MAX_READINGS), init=False
    )

    def note(self, reading: OffloadReading, now: float) -> None:
        """Record a reading. A counter that went back belongs to a new incarnation, which has no
        earlier readings.
        """
        readings = self._readings
        if readings and _has_gone_back(readings[-1][1], reading):
            readings.clear()
        readings.append((now, reading))
        # One reading that is at least `WINDOW_S` old stays, because growth is measured from it.
        while len(readings) > 2 and readings[1][0] <= now - WINDOW_S:
            readings.popleft()

    def growth(self) -> OffloadGrowth:
        """Growth from the oldest reading to the newest."""
        if len(self._readings) < 2:
            return OffloadGrowth()
        (then, earlier), (now, later) = self._readings[0], self._readings[-1]
        lookups = LookupCounters(*_grown(earlier.lookups, later.lookups))
        tiers = {
            name: TierCounters(*_grown(_counters_of(earlier, name), tier.counters))
            for name, tier in later.tiers.items()
        }
        return OffloadGrowth(now - then, lookups, tiers)

    def clear(self) -> None:
        self._readings.clear()


def _counters_of(reading: OffloadReading, tier: str) -> TierCounters:
    found = reading.tiers.get(tier)
    return TierCounters() if found is None else found.counters


# Engines do not show a counter before its first count, so a counter that is missing is 0.


def _grown(earlier: Iterable[float | None], later: Iterable[float | None]) -> list[float | None]:
    return [
        None if after is None else after - (before or 0.0)
        for before, after in zip(earlier, later, strict=True)
    ]


def _has_gone_back(earlier: OffloadReading, later: OffloadReading) -> bool:
    pairs = [*zip(earlier.lookups, later.lookups, strict=True)]
    for name, tier in earlier.tiers.items():
        pairs += zip(tier.counters, _counters_of(later, name), strict=True)
    return any((after or 0.0) < (before or 0.0) for before, after in pairs)


def _share(part: float | None, whole: float | None) -> float | None:
    return min(1.0, part / whole) if part is not None and whole else None
