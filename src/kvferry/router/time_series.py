"""Throughput and latency, second by second, for plots. Bounded: a ring of seconds, each with a few
counts and two sparse histograms.

Pure: the caller passes `now` (local monotonic seconds), which never goes back. Noting something is
an addition or two; quantiles are worked out once, when a second is over. One thread.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

__all__ = ["LatencyHistogram", "SecondStats", "TimeSeries", "quantile"]

KEPT_S = 300
MAX_SPREAD_S = 30
SMALLEST_S = 1e-4
GROWTH = 1.2
"""From one bucket to the next: what is read off a histogram is at most this factor too high."""
MAX_BUCKET = 96
"""Of 1e-4 × 1.2**96 s, more than an hour; what took longer counts as that."""

_PER_BUCKET = 1 / math.log(GROWTH)

LatencyHistogram = dict[int, int]
"""How many fell into a bucket; bucket i ends at SMALLEST_S × GROWTH**i."""


@dataclass(slots=True)
class SecondStats:
    """What happened in one second. `index`: seconds since the clock's zero."""

    index: int
    requests: int = 0
    """That ended."""
    errors: int = 0
    relayed_bytes: int = 0
    tokens: int = 0
    """Generated, as instances report it."""
    moved_bytes: int = 0
    """KV carried between instances, as they report it."""
    ttft: LatencyHistogram = field(default_factory=dict)
    handover: LatencyHistogram = field(default_factory=dict)
    quantiles: tuple[float | None, float | None, float | None, float | None] | None = None
    """p50 and p99 of ttft and of handover; None: not over yet."""


class TimeSeries:
    def __init__(self, kept_s: int = KEPT_S) -> None:
        self._kept_s = kept_s
        self._over: deque[SecondStats] = deque(maxlen=kept_s)
        self._current: SecondStats | None = None
        self._report_lag_s = 0

    def note_end(self, now: float, relayed_bytes: int, is_error: object = False) -> None:
        """A request ended."""
        second = self._at(now)
        second.requests += 1
        second.relayed_bytes += relayed_bytes
        if is_error:
            second.errors += 1

    def note_ttft(self, seconds: float, now: float) -> None:
        """From a request's arrival to the first bytes of its answer."""
        counts, bucket = self._at(now).ttft, _bucket(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def note_handover(self, seconds: float, now: float) -> None:
        """From P's answer to the first bytes of D's."""
        counts, bucket = self._at(now).handover, _bucket(seconds)
        counts[bucket] = counts.get(bucket, 0) + 1

    def note_instances(
        self, tokens: int, moved_bytes: int, now: float, over_s: float = 1.0
    ) -> None:
        """What an instance did since it was last asked, so long ago: spread over that time, because
        it did not happen all at once.
        """
        current = self._at(now)
        length = min(max(1, math.ceil(over_s)), 1 + len(self._over), MAX_SPREAD_S)
        seconds = [current, *islice(reversed(self._over), length - 1)]
        for place, second in enumerate(seconds):
            second.tokens += _share(tokens, place, length)
            second.moved_bytes += _share(moved_bytes, place, length)
        self._report_lag_s = length

    def num_reported(self, seconds: list[SecondStats]) -> int:
        """How many of these all instances have spoken of; the last few await their next word."""
        return max(0, len(seconds) - self._report_lag_s)

    def seconds(self, now: float) -> list[SecondStats]:
        """Those that are over, oldest first; without gaps, and as many as are kept once there are
        that many.
        """
        self._at(now)
        return list(self._over)

    def over_last(
        self, num_seconds: int, now: float, histogram_of: Callable[[SecondStats], LatencyHistogram]
    ) -> LatencyHistogram:
        """One histogram of several seconds."""
        return _merged(histogram_of(second) for second in self.seconds(now)[-num_seconds:])

    def _at(self, now: float) -> SecondStats:
        current = self._current
        index = int(now)
        if current is not None and index <= current.index:
            return current
        if current is not None:
            current.quantiles = _quantiles(current)
            self._over.append(current)
            # Idle seconds are seconds too; more of them than are kept need not be made.
            for missed in range(max(current.index + 1, index - self._kept_s), index):
                self._over.append(SecondStats(missed, quantiles=(None, None, None, None)))
        self._current = SecondStats(index)
        return self._current


def _share(total: int, place: int, length: int) -> int:
    """Of the parts, as equal as they can be, that make the total."""
    return total // length + (place < total % length)


def quantile(histogram: Mapping[int, int], part: float) -> float | None:
    """The upper bound of the bucket that holds it; None when the histogram is empty."""
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
