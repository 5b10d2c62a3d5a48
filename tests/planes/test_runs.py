"""Joining and cutting runs moves exactly the named bytes, in as few and as small parts as asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.planes.runs import Runs, batches, between, coalesce
from kvferry.ports.data import Pieces
from kvferry.types import Region

SLOTS = 40


@st.composite
def pieces(draw: st.DrawFn) -> Pieces:
    piece_bytes = draw(st.integers(1, 16))
    count = draw(st.integers(0, 20))
    local, remote = (draw(st.lists(st.integers(0, SLOTS), min_size=count, max_size=count, unique=True)) for _ in range(2))
    # Mostly neighbours, so that there is something to join.
    remote = sorted(remote) if draw(st.booleans()) else remote
    return Pieces(0, 0, piece_bytes, np.array(sorted(local), np.int64) * piece_bytes, np.array(remote, np.int64) * piece_bytes)


def moved(runs: Runs) -> set[tuple[int, int]]:
    """Every byte as (place here, place there)."""
    triples = zip(runs.local.tolist(), runs.remote.tolist(), runs.size_bytes.tolist(), strict=True)
    return {(local + i, remote + i) for local, remote, size in triples for i in range(size)}


def named(part: Pieces) -> set[tuple[int, int]]:
    pairs = zip(part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True)
    return {(local + i, remote + i) for local, remote in pairs for i in range(part.piece_bytes)}


@given(pieces())
def test_runs_move_the_bytes_of_their_pieces(part: Pieces) -> None:
    runs = coalesce(part)
    assert moved(runs) == named(part)
    assert runs.total_bytes == part.total_bytes


@given(pieces())
def test_no_two_runs_could_be_one(part: Pieces) -> None:
    runs = coalesce(part)
    starts = set(zip(runs.local.tolist(), runs.remote.tolist(), strict=True))
    ends = set(zip((runs.local + runs.size_bytes).tolist(), (runs.remote + runs.size_bytes).tolist(), strict=True))
    assert not starts & ends


def test_the_order_of_pieces_does_not_matter() -> None:
    offsets = np.array([30, 10, 20, 0], np.int64)
    assert len(coalesce(Pieces(0, 0, 10, offsets, offsets + 5))) == 1
    assert len(coalesce(Pieces(0, 0, 10, offsets, np.array([0, 10, 20, 30], np.int64)))) == 3


@given(pieces(), st.integers(1, 50), st.integers(1, 7))
def test_batches_are_bounded_and_lose_nothing(part: Pieces, max_bytes: int, max_runs: int) -> None:
    cut = list(batches(coalesce(part), max_bytes, max_runs))
    assert set().union(*map(moved, cut)) == named(part)
    assert sum(each.total_bytes for each in cut) == part.total_bytes
    assert all(1 <= len(each) <= max_runs and 1 <= each.total_bytes <= max_bytes for each in cut)


def test_nothing_is_one_empty_concatenation_and_no_batch() -> None:
    nothing = between([], [], [])
    assert len(nothing) == 0
    assert nothing.total_bytes == 0
    assert list(batches(nothing, 10, 10)) == []


@given(st.lists(pieces(), max_size=4), st.lists(st.integers(0, 3), max_size=6))
def test_a_transfer_is_what_its_parts_are_at_their_addresses_whoever_shares_offsets(parts: list[Pieces], again: list[int]) -> None:
    near, far = ([Region(str(n), base * (n + 1), 1, 1, 700) for n in range(10)] for base in (10_000, 1_000_000))
    chosen = [*parts, *(parts[n] for n in again if n < len(parts))]
    whole = [Pieces(n, 9 - n, part.piece_bytes, part.local_offsets, part.remote_offsets) for n, part in enumerate(chosen)]
    expected = {(near[n].address + here, far[9 - n].address + there) for n, part in enumerate(whole) for here, there in named(part)}
    assert moved(between(whole, near, far)) == expected
