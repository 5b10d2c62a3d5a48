"""What a data plane that fences writes must do besides: `FENCE_CASES`, run like those of `plane_conformance`.

The far side lends, and is written to by ours.
"""

import itertools
import time

import numpy as np

from kvferry.ports.data import Completion, Pieces
from kvferry.testing.plane_conformance import Case
from kvferry.testing.plane_sides import (
    DEADLINE_S,
    LARGE_BLOCK_BYTES,
    LARGE_BLOCKS,
    LARGE_REGION,
    MEMORY_BYTES,
    SMALL_BLOCK_BYTES,
    SMALL_BLOCKS,
    Pair,
    PairSource,
    digest,
    pattern,
)

__all__ = ["FENCE_CASES"]

CANARY = 77
REPEATS = 64
"""Of the large region, in a write that shall not end by itself."""
UNKNOWN = 1 << 63
ALL_SMALL, ALL_LARGE = range(SMALL_BLOCKS), range(LARGE_BLOCKS)


def a_write_under_no_lent_number_is_refused_and_nothing_lands(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        for number in (0, UNKNOWN, 2 * UNKNOWN - 1):
            _refused(pair, _blocks(2, 3), number, f"number {number} is not lent")
        number = pair.lend(ALL_SMALL, ALL_LARGE)
        assert _write(pair, _blocks(2, 3), number).ok, "refusals cost the writer its peer"
        _far_is(pair, _blocks(2, 3))


def a_write_that_leaves_the_lent_blocks_is_refused_and_nothing_lands(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        number = pair.lend([3, 4, 9], [5])
        size = SMALL_BLOCK_BYTES
        for part in (
            _blocks(0, 5),
            _blocks(1, 3, 4, 5),
            _blocks(LARGE_REGION, 3),
            _blocks(LARGE_REGION, 5, 6),
            _piece(0, 3 * size - 1, size),
            _piece(0, 4 * size + 1, size),
            _piece(0, 5 * size, 1),
            _piece(0, 9 * size - 1, 1),
            _piece(0, 3 * size, 7 * size),
        ):
            _refused(pair, part, number, "leaves the blocks")
        _refused(pair, _blocks(0, 3), pair.lend([], [5]), "leaves the blocks")
        _refused(pair, _blocks(0, 3), pair.lend(), "leaves the blocks")
        assert _write(pair, _blocks(7, 3, 9), number).ok
        _far_is(pair, _blocks(7, 3, 9))


def a_write_within_the_lent_blocks_brings_exactly_the_named_bytes(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        number = pair.lend([9, 3, 4], [5, 639])
        parts = (_blocks(7, 3, 9), _blocks(LARGE_REGION, 639, 5), _piece(1, 4 * SMALL_BLOCK_BYTES - 100, 200))
        for part in parts:
            assert _write(pair, part, number).ok
        _far_is(pair, *parts)


def a_number_that_was_taken_back_before_admits_nothing(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        number, other = pair.lend(ALL_SMALL, ALL_LARGE), pair.lend(ALL_SMALL, ALL_LARGE)
        assert pair.far.take_back(number) == 1, "nothing was being received"
        _refused(pair, _blocks(2, 3), number, "not lent")
        assert _write(pair, _blocks(2, 4), other).ok
        _far_is(pair, _blocks(2, 4))


def a_number_that_was_taken_back_after_a_write_admits_no_more(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        number = pair.lend(ALL_SMALL, ALL_LARGE)
        assert _write(pair, _blocks(2, 3), number).ok
        assert pair.far.take_back(number) == 1, "nothing was being received"
        pair.far.paint(CANARY)
        assert not _write(pair, _blocks(2, 3), number).ok
        _canary_stays(pair)


def a_number_taken_back_amid_a_write_lets_no_byte_land_afterwards(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        number = pair.lend(ALL_SMALL, ALL_LARGE)
        handle = pair.near.plane.write(pair.peer, _endless(), number)
        for _ in range(2):  # the second time as a control: a canary in blocks that are still lent dies
            pair.far.paint(CANARY)
            _until_bytes_land(pair)
        pair.far.take_back(number)
        pair.far.paint(CANARY)
        error = pair.wait(handle)[handle].error
        assert error is not None
        assert "not lent" in error, error
        for _ in range(20):
            assert pair.turn() == []
        _canary_stays(pair)
        assert _write(pair, _blocks(2, 3), pair.lend([3])).ok, "a fence cost the writer its peer"


def a_number_taken_back_leaves_the_writes_under_others_alone(source: PairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        lost, kept = pair.lend([], ALL_LARGE), pair.lend(ALL_SMALL)
        parts = [_blocks(region, *ALL_SMALL) for region in range(LARGE_REGION)]
        doomed = pair.near.plane.write(pair.peer, _endless(), lost)
        pair.far.paint(CANARY)
        _until_bytes_land(pair)
        others = [pair.near.plane.write(pair.peer, parts, kept) for _ in range(6)]
        pair.far.take_back(lost)
        ended = pair.wait(doomed, *others)
        assert not ended[doomed].ok
        for other in others:
            assert ended[other].ok, ended[other].error
        pair.far.paint(0)
        assert _write(pair, parts[0], kept).ok
        expected = np.zeros(MEMORY_BYTES, np.uint8)
        _apply(pair, parts[0], expected)
        assert pair.far.digest() == digest(expected)


def numbers_that_are_not_known_are_taken_back_too(source: PairSource) -> None:
    with source.pair() as pair:
        for number in (UNKNOWN, UNKNOWN, 0):
            assert pair.far.take_back(number) == 1
        handles = [pair.near.plane.take_back(number) for number in (5, 5, 6)]
        assert pair.near.plane.poll_interval_s() is not None
        assert [each.handle for each in pair.near.plane.poll()] == handles
        assert pair.near.plane.poll_interval_s() is None


FENCE_CASES = (
    Case(a_write_under_no_lent_number_is_refused_and_nothing_lands),
    Case(a_write_that_leaves_the_lent_blocks_is_refused_and_nothing_lands),
    Case(a_write_within_the_lent_blocks_brings_exactly_the_named_bytes),
    Case(a_number_that_was_taken_back_before_admits_nothing),
    Case(a_number_that_was_taken_back_after_a_write_admits_no_more),
    Case(a_number_taken_back_amid_a_write_lets_no_byte_land_afterwards),
    Case(a_number_taken_back_leaves_the_writes_under_others_alone),
    Case(numbers_that_are_not_known_are_taken_back_too),
)


def _write(pair: Pair, part: Pieces | list[Pieces], number: int) -> Completion:
    handle = pair.near.plane.write(pair.peer, [part] if isinstance(part, Pieces) else part, number)
    return pair.wait(handle)[handle]


def _refused(pair: Pair, part: Pieces, number: int, why: str) -> None:
    completion = _write(pair, part, number)
    assert completion.error is not None, "a write was let in that should have been refused"
    assert why in completion.error, completion.error
    _far_is(pair)


def _far_is(pair: Pair, *written: Pieces) -> None:
    expected = pattern(pair.far_seed).copy()
    for part in written:
        _apply(pair, part, expected)
    assert pair.far.digest() == digest(expected), "other bytes than the named ones were written"


def _canary_stays(pair: Pair) -> None:
    assert pair.far.digest() == digest(np.full(MEMORY_BYTES, CANARY, np.uint8)), "bytes landed after a number had been taken back"


def _until_bytes_land(pair: Pair) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while pair.far.painted():
        assert pair.turn() == [], "a long write has ended too early"
        assert time.monotonic() < deadline, "no byte has landed"


def _apply(pair: Pair, part: Pieces, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
    for local, remote in zip(part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True):
        at, origin = pair.place(part.remote_region, remote), pair.place(part.local_region, local)
        memory[at : at + part.piece_bytes] = pair.near.memory[origin : origin + part.piece_bytes]


def _blocks(region: int, *blocks: int) -> Pieces:
    size = LARGE_BLOCK_BYTES if region == LARGE_REGION else SMALL_BLOCK_BYTES
    offsets = np.array(blocks, np.int64) * size
    return Pieces(region, region, size, np.sort(offsets)[::-1].copy(), offsets)


def _piece(region: int, offset: int, size: int) -> Pieces:
    return Pieces(region, region, size, np.zeros(1, np.int64), np.array([offset], np.int64))


def _endless() -> list[Pieces]:
    return list(itertools.repeat(_blocks(LARGE_REGION, *ALL_LARGE), REPEATS))
