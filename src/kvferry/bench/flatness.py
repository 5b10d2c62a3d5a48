"""Whether a series of measurements stays where it was: the verdict on memory, files and threads of a long run. Pure.

The first part of a run is warm-up: pages are touched for the first time, bounded tables fill. Of the rest, the middle of the first third is
compared with the middle of the last third; medians, so that one sample taken at a busy moment decides nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

__all__ = ["MIN_SAMPLES", "Tolerance", "Verdict", "judge"]

WARM_UP = 0.25
MIN_SAMPLES = 8
"""Fewer say nothing."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much more the end may be than the beginning: so much, or this share of the beginning, whichever is more."""

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
