"""Tests that a pairwise sample contains every pair of values and is smaller than the product."""

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.sampling import pairwise, sampled

axes = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
    lambda sizes: [range(size) for size in sizes]
)


@given(axes, st.integers(0, 3))
def test_every_pair_of_two_axes_values_is_in_the_sample(axes: list[range], seed: int) -> None:
    sample = pairwise(*axes, seed=seed)
    for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2):
        assert {(case[i], case[j]) for case in sample} == set(itertools.product(first, second))


def test_the_sample_is_much_smaller_than_the_product_and_the_same_in_every_run() -> None:
    axes = (range(3), range(3), range(3), range(3))
    sample = pairwise(*axes, seed=1)
    assert len(sample) <= 15
    assert sample == pairwise(*axes, seed=1)


def test_cases_outside_the_sample_are_run_by_make_test_all_only() -> None:
    cases = sampled("ab", "cd", "ef")
    ordinary = [case.values for case in cases if not case.marks]
    assert len(cases) == 8
    assert sorted(ordinary) == sorted(pairwise("ab", "cd", "ef"))
