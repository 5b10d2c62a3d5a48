"""Tests the multi-turn benchmark: the tokens and bytes it counts between real engine processes, and
how it summarises turns.
"""

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from benchmarks.multiturn import Arrangement, Lengths, PrefillCounts, TurnSample, make_rows

CACHED, UNCACHED = Arrangement(2, prefix_caching=True), Arrangement(1, prefix_caching=False)
BLOCK = 16
TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""KV bytes per token: 4 layers, 2 heads, K and V, 64 floats of 4 bytes each."""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_with_reuse_p_computes_what_is_new_and_fetches_the_rest() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "multiturn",
        "--json",
        "--conversations",
        "1",
        "--turns",
        "3",
    ]
    lengths = ["--first-tokens", "320", "--answer-tokens", "80", "--prefix-caching", "off"]
    ran = subprocess.run([*command, *lengths], capture_output=True, text=True)
    assert ran.stdout, ran.stderr
    rows: dict[tuple[bool, int], dict[str, Any]] = {
        (row["reuse"], row["turn"]): row for row in json.loads(ran.stdout)["rows"]
    }
    assert len(rows) == 2 * 3
    for row in rows.values():
        assert (
            row["computed_tokens"] + row["cached_tokens"] + row["pulled_tokens"]
            == row["prompt_tokens"]
        )
        # A pull moves whole blocks.
        assert row["pulled_bytes"] == -(-row["pulled_tokens"] // BLOCK) * BLOCK * TOKEN_BYTES
        assert row["pulled_tokens"] == 0 or row["reuse"]
        assert row["ttft_p50_ms"] > 0
    for before, after in pairwise(range(1, 4)):
        # P pulls all tokens that D held when the previous turn ended, except those of a partial
        # block.
        known = rows[True, before]["prompt_tokens"] + 80
        assert known - BLOCK < rows[True, after]["pulled_tokens"] <= known
        # The control: without reuse and without prefix caching, P computes the whole prompt again.
        assert rows[False, after]["computed_tokens"] == rows[False, after]["prompt_tokens"]


def turn(
    arrangement: Arrangement, number: int, reuse: bool, ttft_s: float, computed: int
) -> TurnSample:
    return TurnSample(
        arrangement,
        reuse,
        number,
        100 * number,
        ttft_s,
        PrefillCounts(computed, 0, 100 * number - computed, 8),
    )


def test_a_row_sums_up_one_turn_beside_the_same_without_reuse() -> None:
    turns = [
        turn(UNCACHED, 2, reuse, ttft, computed)
        for reuse, ttft, computed in ((True, 0.01, 20), (False, 0.04, 200), (True, 0.03, 40))
    ]
    turns += [turn(CACHED, 1, False, 0.05, 100)]
    first, plain, reused = make_rows(turns)
    assert (first["prefill_engines"], first["turn"], first["of_no_reuse"]) == (2, 1, 1.0)
    assert (
        plain["reuse"],
        plain["ttft_p50_ms"],
        plain["computed_tokens"],
        plain["of_no_reuse"],
    ) == (False, 40.0, 200, 1.0)
    assert (
        reused["reuse"],
        reused["ttft_p50_ms"],
        reused["of_no_reuse"],
        reused["prompt_tokens"],
    ) == (True, 20.0, 0.5, 200)
    assert (reused["computed_tokens"], reused["pulled_tokens"], reused["pulled_bytes"]) == (
        20,
        160,
        8,
    )


def test_a_conversation_is_as_long_as_all_that_is_said_in_it() -> None:
    assert (
        Lengths(turns=3, first_tokens=100, user_tokens=10, answer_tokens=5).total
        == 100 + 2 * 10 + 3 * 5
    )
