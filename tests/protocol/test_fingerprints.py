"""Tests that fingerprints give a lower bound of the longest common prefix, and never count a token
that differs.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.fingerprints import (
    DIGEST_BYTES,
    MAX_POINTS,
    Fingerprint,
    common_prefix,
    fingerprint,
    shared_prefix,
)

tokens = st.lists(st.integers(0, 3), max_size=200)


def shared_length(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(tokens, st.integers(1, 20))
def test_a_sequence_shares_all_of_itself(ids: list[int], granularity: int) -> None:
    assert common_prefix(fingerprint(ids, granularity, ""), ids, "") == len(ids)


@given(tokens, tokens, st.integers(1, 20))
def test_no_token_beyond_the_true_common_prefix_is_claimed(
    theirs: list[int], ours: list[int], granularity: int
) -> None:
    claimed = common_prefix(fingerprint(theirs, granularity, ""), ours, "")
    true = shared_length(theirs, ours)
    assert claimed <= true
    assert claimed >= true - true % granularity


@given(tokens, tokens, st.integers(1, 20))
def test_a_longer_prompt_shares_everything_they_have(
    theirs: list[int], more: list[int], granularity: int
) -> None:
    assert common_prefix(fingerprint(theirs, granularity, ""), theirs + more, "") == len(theirs)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50))
def test_another_salt_shares_nothing(ids: list[int]) -> None:
    assert common_prefix(fingerprint(ids, 4, "lora-a"), ids, "lora-b") == 0


def test_a_long_sequence_has_a_bounded_fingerprint() -> None:
    ids = [i % 50_000 for i in range(131_072)]
    made = fingerprint(ids, 16, "")
    assert len(made.digests) <= MAX_POINTS * DIGEST_BYTES
    made.check()
    assert common_prefix(made, ids[:70_000], "") >= 70_000 - made.step


@pytest.mark.parametrize(
    "bad",
    [
        Fingerprint(0, 4, b""),
        Fingerprint(4, -1, b""),
        Fingerprint(4, 4, b""),
        Fingerprint(1, 5000, bytes(5000 * DIGEST_BYTES)),
    ],
)
def test_fields_that_do_not_fit_together_are_refused(bad: Fingerprint) -> None:
    with pytest.raises(RemoteProtocolError):
        bad.check()


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (fingerprint(range(10), 4, ""), fingerprint(range(10), 4, ""), 10),
        (fingerprint(range(10), 4, ""), fingerprint(range(10), 8, ""), 10),
        (fingerprint(range(10), 4, ""), fingerprint(range(9), 4, ""), 8),
        (fingerprint(range(10), 4, ""), fingerprint([*range(9), 77], 4, ""), 8),
        (fingerprint(range(10), 4, ""), fingerprint([77, *range(1, 10)], 4, ""), 0),
        (fingerprint(range(10), 4, ""), fingerprint(range(10), 4, "salt"), 0),
        (fingerprint(range(10), 4, ""), fingerprint([], 4, ""), 0),
        (fingerprint(range(12), 4, ""), fingerprint(range(12), 3, ""), 12),
        (fingerprint(range(13), 4, ""), fingerprint(range(14), 6, ""), 12),
    ],
)
def test_two_fingerprints_bound_what_their_sequences_share(
    one: Fingerprint, other: Fingerprint, shared: int
) -> None:
    assert shared_prefix(one, other) == shared_prefix(other, one) == shared
