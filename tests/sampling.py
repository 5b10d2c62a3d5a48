"""Large products of test parameters: `make test` runs a sample, `make test-all` runs everything.

The sample is pairwise: for any two axes, every combination of their values is in the sample. Most
bugs that depend on parameters depend on one or two of them, and a pairwise sample of three axes
with three values each has 9 cases instead of 27. The seed is fixed, so every run has the same
sample.
"""

import itertools
import random
from collections.abc import Hashable, Sequence
from typing import Any

import pytest

exhaustive = pytest.mark.exhaustive


def pairwise(*axes: Sequence[Hashable], seed: int = 0) -> list[tuple[Any, ...]]:
    """Return a small part of the product of `axes` that contains every pair of values of any two
    axes.
    """
    product = list(itertools.product(*axes))
    # Ties are broken by position, so the seed decides which of several equal samples is taken.
    random.Random(seed).shuffle(product)
    missing = set().union(*map(_pairs, product))
    chosen = []
    while missing:
        best = max(product, key=lambda case: len(_pairs(case) & missing))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def sampled(*axes: Sequence[Hashable], seed: int = 0) -> list[Any]:
    """Return the whole product as `pytest.param`; cases outside the pairwise sample are marked
    exhaustive.
    """
    sample = set(pairwise(*axes, seed=seed))
    return [
        pytest.param(*case, marks=() if case in sample else exhaustive)
        for case in itertools.product(*axes)
    ]


def seeds(count: int, exhaustively: int) -> list[Any]:
    """Return the first `exhaustively` seeds as `pytest.param`; all but the first `count` are marked
    exhaustive.
    """
    return [
        pytest.param(seed, marks=() if seed < count else exhaustive) for seed in range(exhaustively)
    ]


def leave_out_exhaustive(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked exhaustive, unless pytest was started with `--exhaustive`."""
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def _pairs(case: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(enumerate(case), 2))
