"""Throughput and latency per second, for the plots of the dashboard.

Bounded: a ring buffer of seconds, each with a few counters and two sparse histograms. Pure: the
caller passes `now` (local monotonic seconds), which never goes back. An update is one or two
additions; quantiles are computed once, when a second is over. Used on one thread.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

KEPT_S = 300
"""Number of seconds that are kept."""
MAX_SPREAD_S = 30
"""Most seconds over which one report of an instance is spread."""
SMALLEST_S = 1e-4
"""Upper bound of the first bucket."""
GROWTH = 1.2
"""Factor between two bucket bounds: a quantile is at most this factor too high."""
MAX_BUCKET = 96
"""Last bucket, at 1e-4 × 1.2**96 s, more than an hour; longer times count there."""

_PER_BUCKET = 1 / math.log(GROWTH)

LatencyHistogram = dict[int, int]
"""Counts by bucket; the upper bound of bucket i is SMALLEST_S × GROWTH**i."""


@dataclass(slots=True)
class SecondStats:
    """Events of one second. `index`: seconds since the zero of the clock."""

    index: int
    requests: int = 0
    """Requests that ended."""
    errors: int = 0
    relayed_bytes: int = 0
    tokens: int = 0
    """Generated tokens, as reported by instances."""
    moved_bytes: int = 0
    """Bytes of KV moved between instances, as reported by instances."""
    ttft: LatencyHistogram = field(default_factory=dict)
    """Times to the first token."""
    handover: LatencyHistogram = field(default_factory=dict)
    """Times from P's answer to the first bytes of D's answer."""
    quantiles: tuple[float | None, float | None, float | None, float | None] | None = None
    """p50 and p99 of ttft and of handover; None while the second is not over."""


class TimeSeries:
    """The last `kept_s` seconds."""

    def __init__(self, kept_s: int = KEPT_S) -> None:
        self._kept_s = kept_s
        self._over: deque[SecondStats] = deque(maxlen=kept_s)
        self._current: SecondStats | None = None
        self._report_lag_s = 0

    def note_end(self, now: float, relayed_bytes: int, is_error: object = False) -> None:
        """Count a request that ended."""
        second = self._at(now)
        second.requests += 1
        second.relayed_bytes += relayed_bytes
        if is_error:
            second.errors += 1

    def note_ttft(self, seconds: float, now: float) -> None:
        """Record the time from a request's arrival to the first bytes of its response."""
        counts, bucket = self._at(now).ttft, _bucket(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def note_handover(self, seconds: float, now: float) -> None:
        """Record the time from P's answer to the first bytes of D's answer."""
        counts, bucket = self._at(now).handover, _bucket(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def note_instances(
        self, tokens: int, moved_bytes: int, now: float, over_s: float = 1.0
    ) -> None:
        """Add an instance's growth since its last report. The growth is spread over `over_s`
        seconds, because the instance worked all that time.
        """
        current = self._at(now)
        length = min(max(1, math.ceil(over_s)), 1 + len(self._over), MAX_SPREAD_S)
        seconds = [current, *islice(reversed(self._over), length - 1)]
        for place, second in enumerate(seconds):
            second.tokens += _share(tokens, place, length)
            second.moved_bytes += _share(moved_bytes, place, length)
        self._report_lag_s = length

    def num_reported(self, seconds: list[SecondStats]) -> int:
        """How many of the seconds are complete; the last seconds await the next reports."""
        return max(0, len(seconds) - self._report_lag_s)

    def seconds(self, now: float) -> list[SecondStats]:
        """The seconds that are over, oldest first, without gaps; at most `kept_s`."""
        self._at(now)
        return list(self._over)

    def over_last(
        self, num_seconds: int, now: float, histogram_of: Callable[[SecondStats], LatencyHistogram]
    ) -> LatencyHistogram:
        """Merge the histograms of the last seconds."""
        return _merged(histogram_of(second) for second in self.seconds(now)[-num_seconds:])

    def _at(self, now: float) -> SecondStats:
        current = self._current
        index = int(now)
        if current is not None and index <= current.index:
            return current
        if current is not None:
            current.quantiles = _quantiles(current)
            self._over.append(current)
            # Idle seconds appear in plots too; more idle seconds than are kept are not made.
            for missed in range(max(current.index + 1, index - self._kept_s), index):
                self._over.append(SecondStats(missed, quantiles=(None, None, None, None)))
        self._current = SecondStats(index)
        return self._current


def _share(total: int, place: int, length: int) -> int:
    """The part number `place` of `length` nearly equal parts that add up to `total`."""
    return total // length + (place < total % length)


def quantile(histogram: Mapping[int, int], part: float) -> float | None:
    """Upper bound of the bucket that contains the quantile; None if the histogram is empty."""
    wanted, seen = part * sum(histogram.values()), 0
    for bucket in sorted(histogram):
        seen += histogram[bucket]
        if seen >= wanted:
            return float(SMALLEST_S * GROWTH**bucket)
    return None


def _bucket(seconds: float) -> int:
    if not seconds > SMALLEST_S:
        return 0
    return (
        min(MAX_BUCKET, math.ceil(math.log(seconds / SMALLEST_S) * _PER_BUCKET))
        if seconds < math.inf
        else MAX_BUCKET
    )


def _quantiles(
    second: SecondStats,
) -> tuple[float | None, float | None, float | None, float | None]:
    ttft, handover = second.ttft, second.handover
    return (
        quantile(ttft, 0.5),
        quantile(ttft, 0.99),
        quantile(handover, 0.5),
        quantile(handover, 0.99),
    )


def _merged(histograms: Iterable[Mapping[int, int]]) -> LatencyHistogram:
    merged: LatencyHistogram = {}
    for histogram in histograms:
        for bucket, count in histogram.items():
            merged[bucket] = merged.get(bucket, 0) + count
    return merged
