"""Statistics for benchmarks: quantiles, ratios, and whether a series stays flat. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which this share of the values lies; None without values.

    Between two neighbours the result is interpolated linearly.
    """
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return `ours` divided by `theirs`, rounded; None when either is missing or `theirs` is 0."""
    return rounded(ours / theirs, 3) if ours is not None and theirs else None


def rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


# -- flatness --
# Whether memory, open files and threads stay flat during a long run. The first part of a run is
# warm-up: pages are touched for the first time, bounded tables fill. Of the rest, the median of the
# first third is compared with the median of the last third; a median, so that one sample at a busy
# moment decides nothing.


WARM_UP = 0.25
MIN_SAMPLES = 8
"""The minimum length of a series; shorter series give no verdict."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed growth: an absolute amount or a share of the start, whichever is larger."""

    absolute: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The start and end of a series, and the allowed growth."""

    before: float
    after: float
    allowed: float
    """The largest allowed difference between `after` and `before`."""

    @property
    def growth(self) -> float:
        return self.after - self.before

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed


def judge(series: Sequence[float], tolerance: Tolerance) -> Verdict | None:
    """Compare the start and end of a series; None if the series is too short."""
    if len(series) < MIN_SAMPLES:
        return None
    settled = series[int(len(series) * WARM_UP) :]
    third = max(2, len(settled) // 3)
    before, after = median(settled[:third]), median(settled[-third:])
    return Verdict(before, after, max(tolerance.absolute, tolerance.share * before))
