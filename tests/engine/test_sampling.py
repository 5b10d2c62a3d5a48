"""Tests token sampling: the distribution is right, repeatable, and independent of the batch."""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.messages import SamplingParams, SequenceSlice
from kvferry.engine.model.sampling import choose, choose_tokens, uniform

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05]))


def share_of(
    sampling: SamplingParams,
    token: int,
    logits: npt.NDArray[np.float64] = LOGITS,
    draws: int = 4000,
) -> float:
    counts = Counter(
        choose(logits, sampling, (), uniform(1, index)).token_id for index in range(draws)
    )
    return counts[token] / draws


def test_zero_temperature_takes_the_likeliest_and_of_equals_the_first() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert choose(np.array([1.0, 3.0, 2.0, 3.0]), greedy, (), 0.99).token_id == 1
    assert choose(np.array([1.0, 3.0, 2.0, 3.0]), greedy, (1,), 0.0).token_id == 3


@pytest.mark.parametrize("token", range(5))
def test_plain_sampling_follows_the_distribution(token: int) -> None:
    assert abs(share_of(SamplingParams(), token) - math.exp(LOGITS[token])) < 0.03


def test_temperature_sharpens() -> None:
    weights = np.exp(LOGITS / 0.5)
    assert abs(share_of(SamplingParams(temperature=0.5), 0) - weights[0] / weights.sum()) < 0.03


def test_top_k_keeps_exactly_the_k_likeliest() -> None:
    sampling = SamplingParams(top_k=2)
    assert abs(share_of(sampling, 0) - 0.5 / 0.7) < 0.03
    assert abs(share_of(sampling, 1) - 0.2 / 0.7) < 0.03
    ties = np.array([1.0, 1.0, 1.0, 1.0])
    assert {choose(ties, sampling, (), uniform(2, index)).token_id for index in range(100)} == {
        0,
        1,
    }


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {0}), (0.49, {0}), (0.6, {0, 1}), (0.8, {0, 1, 2}), (1.0, {0, 1, 2, 3, 4})],
)
def test_top_p_keeps_the_smallest_set_that_holds_it(top_p: float, kept: set[int]) -> None:
    sampling = SamplingParams(top_p=top_p)
    assert {
        choose(LOGITS, sampling, (), uniform(3, index)).token_id for index in range(500)
    } == kept


def test_banned_tokens_are_never_chosen_and_unknown_ones_ignored() -> None:
    chosen = {
        choose(LOGITS, SamplingParams(), (0, 3, 99, -1), uniform(4, index)).token_id
        for index in range(500)
    }
    assert chosen == {1, 2, 4}


def test_logprobs_are_of_the_raw_distribution() -> None:
    sampling = SamplingParams(temperature=0.3, top_k=2, logprobs=3)
    token = choose(LOGITS + 7.0, sampling, (0,), 0.0)
    assert token.token_id == 1
    assert token.logprob == pytest.approx(math.log(0.2))
    assert [number for number, _ in token.top_logprobs] == [0, 1, 2]
    assert [value for _, value in token.top_logprobs] == pytest.approx(
        [math.log(0.5), math.log(0.2), math.log(0.15)]
    )


@pytest.mark.parametrize(("asked", "given_"), [(0, 0), (1, 1), (5, 5), (50, 5)])
def test_as_many_alternatives_as_asked_for_and_there(asked: int, given_: int) -> None:
    token = choose(LOGITS, SamplingParams(logprobs=asked), (), 0.5)
    assert token.logprob is not None
    assert len(token.top_logprobs) == given_
    assert choose(LOGITS, SamplingParams(), (), 0.5).logprob is None


@given(seed=st.integers(-(2**70), 2**70), index=st.integers(0, 2**40))
def test_random_numbers_are_in_range_and_repeatable(seed: int, index: int) -> None:
    assert 0.0 <= uniform(seed, index) < 1.0
    assert uniform(seed, index) == uniform(seed, index)
    assert uniform(seed, index) != uniform(seed, index + 1)


def test_random_numbers_are_spread_evenly_over_indices_and_seeds() -> None:
    for numbers in (
        [uniform(5, index) for index in range(5000)],
        [uniform(seed, 5) for seed in range(5000)],
    ):
        counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
        assert counts.min() > 400
        assert counts.max() < 600


@given(
    logits=st.lists(st.floats(-1e6, 1e6) | st.just(-math.inf), min_size=1, max_size=30).filter(
        lambda row: max(row) > -math.inf
    ),
    temperature=st.floats(0, 100),
    top_p=st.floats(1e-6, 1),
    top_k=st.integers(0, 40),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_a_token_that_cannot_be_is_never_chosen(
    logits: list[float], temperature: float, top_p: float, top_k: int, draw: float
) -> None:
    token = choose(
        np.array(logits),
        SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k),
        (),
        draw,
    ).token_id
    assert logits[token] > -math.inf
    if top_k:
        assert sum(value > logits[token] for value in logits) < top_k


def test_a_choice_does_not_depend_on_the_rest_of_the_batch() -> None:
    numbers = np.random.default_rng(6)
    logits = numbers.normal(size=(8, 50))
    slices = [
        SequenceSlice(f"r{row}", (1,), 0, ((0,),), SamplingParams(), draw_seed=row, draw_index=9)
        for row in range(8)
    ]
    together = choose_tokens(logits, slices)
    assert together == {
        part.request_id: choose_tokens(logits[[row]], [part])[part.request_id]
        for row, part in enumerate(slices)
    }
    assert len({token.token_id for token in together.values()}) > 3


def test_logits_that_are_no_numbers_still_give_a_token_of_the_vocabulary() -> None:
    for logits in (np.full(5, np.nan), np.array([1.0, np.nan, 2.0]), np.array([np.inf, 1.0])):
        with np.errstate(invalid="ignore"):
            for temperature in (0.0, 1.0):
                token = choose(
                    logits,
                    SamplingParams(temperature=temperature, top_p=0.9, top_k=2, logprobs=2),
                    (),
                    0.5,
                )
                assert 0 <= token.token_id < len(logits)
