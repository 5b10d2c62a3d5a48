"""Tests the benchmarks' statistics, which are easy to get subtly wrong: quantiles, ratios and
rounding.
"""

import pytest

from kvferry.bench.figures import quantile, ratio, rounded


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.5, 3.0),
        ([3.0], 0.9, 3.0),
        ([1.0, 3.0], 0.5, 2.0),
        ([5.0, 1.0, 3.0], 0.5, 3.0),
        (list(range(11)), 0.9, 9.0),
        (list(range(21)), 0.9, 18.0),
        ([0.0, 10.0], 0.9, 9.0),
        ([4.0, 2.0], 0.0, 2.0),
        ([4.0, 2.0], 1.0, 4.0),
    ],
)
def test_a_quantile_lies_between_its_neighbours(
    values: list[float], share: float, expected: float
) -> None:
    assert quantile(values, share) == pytest.approx(expected)


def test_nothing_measured_is_no_number() -> None:
    assert quantile([], 0.5) is None
    assert rounded(None) is None
    assert ratio(None, 2.0) is None
    assert ratio(1.0, None) is None
    assert ratio(1.0, 0.0) is None


def test_a_ratio_is_ours_over_theirs() -> None:
    assert ratio(1.0, 4.0) == 0.25
    assert ratio(0.0, 4.0) == 0.0
