"""Tests that joining segments and splitting them into batches moves exactly the named bytes, with
as few descriptors as possible and in bounded batches.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports.base import Segments
from kvferry.transports.copy.segments import Descriptors, batches, coalesce, descriptors_between
from kvferry.types import Region

SLOTS = 40


@st.composite
def segments(draw: st.DrawFn) -> Segments:
    segment_bytes = draw(st.integers(1, 16))
    count = draw(st.integers(0, 20))
    local, remote = (
        draw(st.lists(st.integers(0, SLOTS), min_size=count, max_size=count, unique=True))
        for _ in range(2)
    )
    # Most segments are adjacent, so that some can be joined.
    remote = sorted(remote) if draw(st.booleans()) else remote
    return Segments(
        0,
        0,
        segment_bytes,
        np.array(sorted(local), np.int64) * segment_bytes,
        np.array(remote, np.int64) * segment_bytes,
    )


def moved(descriptors: Descriptors) -> set[tuple[int, int]]:
    """Return every moved byte as (local address, remote address)."""
    triples = zip(
        descriptors.local.tolist(),
        descriptors.remote.tolist(),
        descriptors.size_bytes.tolist(),
        strict=True,
    )
    return {(local + i, remote + i) for local, remote, size in triples for i in range(size)}


def named(part: Segments) -> set[tuple[int, int]]:
    pairs = zip(part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True)
    return {(local + i, remote + i) for local, remote in pairs for i in range(part.segment_bytes)}


@given(segments())
def test_runs_move_the_bytes_of_their_segments(part: Segments) -> None:
    descriptors = coalesce(part)
    assert moved(descriptors) == named(part)
    assert descriptors.total_bytes == part.total_bytes


@given(segments())
def test_no_two_runs_could_be_one(part: Segments) -> None:
    descriptors = coalesce(part)
    starts = set(zip(descriptors.local.tolist(), descriptors.remote.tolist(), strict=True))
    ends = set(
        zip(
            (descriptors.local + descriptors.size_bytes).tolist(),
            (descriptors.remote + descriptors.size_bytes).tolist(),
            strict=True,
        )
    )
    assert not starts & ends


def test_the_order_of_segments_does_not_matter() -> None:
    offsets = np.array([30, 10, 20, 0], np.int64)
    assert len(coalesce(Segments(0, 0, 10, offsets, offsets + 5))) == 1
    assert len(coalesce(Segments(0, 0, 10, offsets, np.array([0, 10, 20, 30], np.int64)))) == 3


@given(segments(), st.integers(1, 50), st.integers(1, 7))
def test_batches_are_bounded_and_lose_nothing(
    part: Segments, max_bytes: int, max_descriptors: int
) -> None:
    cut = list(batches(coalesce(part), max_bytes, max_descriptors))
    assert set().union(*map(moved, cut)) == named(part)
    assert sum(each.total_bytes for each in cut) == part.total_bytes
    assert all(
        1 <= len(each) <= max_descriptors and 1 <= each.total_bytes <= max_bytes for each in cut
    )


def test_nothing_is_one_empty_concatenation_and_no_batch() -> None:
    nothing = descriptors_between([], [], [])
    assert len(nothing) == 0
    assert nothing.total_bytes == 0
    assert list(batches(nothing, 10, 10)) == []


@given(st.lists(segments(), max_size=4), st.lists(st.integers(0, 3), max_size=6))
def test_a_transfer_is_what_its_parts_are_at_their_addresses_whoever_shares_offsets(
    parts: list[Segments], again: list[int]
) -> None:
    near, far = (
        [Region(str(n), base * (n + 1), 1, 1, 700) for n in range(10)]
        for base in (10_000, 1_000_000)
    )
    chosen = [*parts, *(parts[n] for n in again if n < len(parts))]
    whole = [
        Segments(n, 9 - n, part.segment_bytes, part.local_offsets, part.remote_offsets)
        for n, part in enumerate(chosen)
    ]
    expected = {
        (near[n].address + here, far[9 - n].address + there)
        for n, part in enumerate(whole)
        for here, there in named(part)
    }
    assert moved(descriptors_between(whole, near, far)) == expected
