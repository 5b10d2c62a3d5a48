"""Tests the flatness verdict: a steady level is flat; growth beyond the tolerance is not, however
slow.
"""

import random

import pytest

from kvferry.bench.figures import MIN_SAMPLES, Tolerance, judge

LITTLE = Tolerance(4.0, 0.02)


def verdict(series: list[float], tolerance: Tolerance = LITTLE) -> bool:
    found = judge(series, tolerance)
    assert found is not None
    return found.is_flat


def test_a_level_with_noise_is_flat() -> None:
    rng = random.Random(0)
    assert verdict([300 + rng.uniform(-5, 5) for _ in range(200)])


def test_what_grows_all_the_time_is_not_flat() -> None:
    rng = random.Random(0)
    assert not verdict([300 + 0.2 * i + rng.uniform(-5, 5) for i in range(200)])
    assert not verdict([float(i) for i in range(MIN_SAMPLES)], Tolerance(0))


def test_what_grows_in_steps_is_not_flat() -> None:
    assert not verdict([10.0] * 150 + [16.0] * 50, Tolerance(2))


def test_a_warm_up_is_forgiven_and_so_is_a_single_peak() -> None:
    assert verdict([100.0 + min(i, 40) for i in range(200)])
    assert verdict([100.0] * 190 + [900.0] + [100.0] * 9)


def test_what_shrinks_is_flat() -> None:
    assert verdict([300.0 - i for i in range(200)])


@pytest.mark.parametrize(("growth", "is_flat"), [(6, True), (6.1, False)])
def test_the_larger_of_both_tolerances_counts(growth: float, is_flat: bool) -> None:
    assert verdict([300.0] * 100 + [300.0 + growth] * 100) is is_flat


def test_a_few_samples_say_nothing() -> None:
    assert judge([1.0] * (MIN_SAMPLES - 1), LITTLE) is None
