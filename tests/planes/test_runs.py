"""Joining and cutting runs moves exactly the named bytes, in as few and as small parts as asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.planes.runs import Runs, batches, coalesce, concatenate
from kvferry.ports.data import Pieces

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
    assert moved(concatenate(cut)) == named(part)
    assert sum(each.total_bytes for each in cut) == part.total_bytes
    assert all(1 <= len(each) <= max_runs and 1 <= each.total_bytes <= max_bytes for each in cut)


def test_nothing_is_one_empty_concatenation_and_no_batch() -> None:
    nothing = concatenate([])
    assert len(nothing) == 0
    assert nothing.total_bytes == 0
    assert list(batches(nothing, 10, 10)) == []
