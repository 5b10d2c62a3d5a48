"""The few numbers a series of measurements is told in. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["MIN_SAMPLES", "Tolerance", "Verdict", "judge", "quantile", "ratio", "rounded"]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which this share of them lies, between two neighbours if need be; None for no
    values.
    """
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """None when either is missing or there is nothing to divide by."""
    return rounded(ours / theirs, 3) if ours is not None and theirs else None


def rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


# -------------------- flatness -------------------- Whether a series of measurements stays where it
# was: the verdict on memory, files and threads of a long run. Pure.
#
# The first part of a run is warm-up: pages are touched for the first time, bounded tables fill. Of
# the rest, the middle of the first third is compared with the middle of the last third; medians, so
# that one sample taken at a busy moment decides nothing.


WARM_UP = 0.25
MIN_SAMPLES = 8
"""Fewer say nothing."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much more the end may be than the beginning: so much, or this share of the beginning,
    whichever is more.
    """

    absolute: float
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    before: float
    after: float
    allowed: float
    """The most that `after` may exceed `before` by."""

    @property
    def growth(self) -> float:
        return self.after - self.before

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.allowed


def judge(series: Sequence[float], tolerance: Tolerance) -> Verdict | None:
    """None when there are too few samples to say."""
    if len(series) < MIN_SAMPLES:
        return None
    settled = series[int(len(series) * WARM_UP) :]
    third = max(2, len(settled) // 3)
    before, after = median(settled[:third]), median(settled[-third:])
    return Verdict(before, after, max(tolerance.absolute, tolerance.share * before))
