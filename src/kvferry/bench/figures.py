"""The few numbers a series of measurements is told in. Pure."""

import math
from collections.abc import Sequence

__all__ = ["quantile", "ratio", "rounded"]


def quantile(values: Sequence[float], share: float) -> float | None:
    """The value below which this share of them lies, between two neighbours if need be; None for no values."""
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
