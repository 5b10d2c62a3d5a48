import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.time_series import (
    GROWTH,
    KEPT_S,
    SMALLEST_S,
    LatencyHistogram,
    TimeSeries,
    quantile,
)


def histogram_of(values: list[float]) -> LatencyHistogram:
    time_series = TimeSeries()
    for value in values:
        time_series.note_ttft(value, now=0.0)
    return time_series.over_last(1, 1.0, lambda second: second.ttft)


def test_what_happens_in_a_second_is_shown_once_it_is_over() -> None:
    time_series = TimeSeries()
    time_series.note_end(100.2, relayed_bytes=10)
    time_series.note_end(100.9, relayed_bytes=5, is_error=True)
    time_series.note_instances(tokens=7, moved_bytes=4096, now=100.95)
    assert time_series.seconds(100.99) == []
    (second,) = time_series.seconds(101.0)
    assert (second.index, second.requests, second.errors, second.relayed_bytes) == (100, 2, 1, 15)
    assert (second.tokens, second.moved_bytes) == (7, 4096)


def test_what_an_instance_did_between_two_looks_is_spread_over_that_time() -> None:
    time_series = TimeSeries()
    for second in range(5):
        time_series.note_end(100.0 + second, relayed_bytes=0)
    time_series.note_instances(tokens=10, moved_bytes=3, now=104.9, over_s=2.5)
    seconds = time_series.seconds(105.0)
    assert [second.tokens for second in seconds] == [0, 0, 3, 3, 4]
    assert [second.moved_bytes for second in seconds] == [0, 0, 1, 1, 1]
    assert time_series.num_reported(seconds) == 2


@given(st.integers(0, 10**12), st.floats(0.001, 10**6), st.integers(0, 50))
def test_what_is_spread_is_neither_more_nor_less(tokens: int, over_s: float, age_s: int) -> None:
    time_series = TimeSeries()
    time_series.note_end(0.0, relayed_bytes=0)
    time_series.note_instances(tokens, 0, now=float(age_s), over_s=over_s)
    assert sum(second.tokens for second in time_series.seconds(age_s + 1.0)) == tokens


def test_idle_seconds_are_there_and_empty() -> None:
    time_series = TimeSeries()
    time_series.note_ttft(0.25, now=10.0)
    time_series.note_end(14.5, relayed_bytes=1)
    seconds = time_series.seconds(15.0)
    assert [second.index for second in seconds] == [10, 11, 12, 13, 14]
    assert [second.requests for second in seconds] == [0, 0, 0, 0, 1]
    assert [second.quantiles is not None and second.quantiles[0] is None for second in seconds] == [
        False,
        True,
        True,
        True,
        True,
    ]


def test_a_long_idle_time_costs_no_more_than_the_ring() -> None:
    time_series = TimeSeries()
    time_series.note_end(0.0, relayed_bytes=1)
    seconds = time_series.seconds(10.0**12)
    assert len(seconds) == KEPT_S
    assert seconds[-1].index == 10**12 - 1
    assert sum(second.requests for second in seconds) == 0


def test_ttft_and_handover_do_not_mix() -> None:
    time_series = TimeSeries()
    time_series.note_ttft(1.0, now=0.0)
    time_series.note_handover(0.01, now=0.0)
    (second,) = time_series.seconds(1.0)
    assert second.quantiles is not None
    assert second.quantiles[0] == pytest.approx(1.0, rel=GROWTH - 1)
    assert second.quantiles[2] == pytest.approx(0.01, rel=GROWTH - 1)


@given(st.lists(st.floats(SMALLEST_S, 3000.0), min_size=1), st.floats(0.01, 1.0))
def test_a_quantile_is_never_too_low_and_at_most_one_bucket_too_high(
    values: list[float], part: float
) -> None:
    exact = sorted(values)[max(0, math.ceil(part * len(values)) - 1)]
    shown = quantile(histogram_of(values), part)
    assert shown is not None
    assert exact * (1 - 1e-9) <= shown <= exact * GROWTH * (1 + 1e-9)


def test_no_latency_at_all_has_no_quantile() -> None:
    assert quantile({}, 0.5) is None


@pytest.mark.parametrize("odd", [-1.0, 0.0, math.nan, math.inf, 1e300])
def test_odd_durations_are_counted_somewhere(odd: float) -> None:
    assert sum(histogram_of([odd]).values()) == 1


@given(st.lists(st.tuples(st.floats(0, 700), st.integers(0, 3))))
def test_nothing_is_lost_or_counted_twice_within_the_kept_time(
    events: list[tuple[float, int]],
) -> None:
    time_series = TimeSeries()
    now = 0.0
    noted: list[tuple[int, int]] = []
    for pause, count in events:
        now += pause
        for _ in range(count):
            time_series.note_end(now, relayed_bytes=1)
        noted.append((int(now), count))
    seconds = time_series.seconds(int(now) + 1.0)
    assert len(seconds) <= KEPT_S
    assert [second.index for second in seconds] == list(
        range(int(now) + 1 - len(seconds), int(now) + 1)
    )
    first = seconds[0].index if seconds else 0
    assert sum(second.requests for second in seconds) == sum(
        count for at, count in noted if at >= first
    )
