"""Conformance cases for data transports that support write grants: `WRITE_GRANT_CASES`.

They run like the cases of `transport_conformance`.

The far side grants writes into its blocks, and the near side writes.
"""

import itertools
import time

import numpy as np

from kvferry.testing.transport_conformance import Case
from kvferry.testing.transport_pairs import (
    DEADLINE_S,
    LARGE_BLOCK_BYTES,
    LARGE_BLOCKS,
    LARGE_REGION,
    MEMORY_BYTES,
    SMALL_BLOCK_BYTES,
    SMALL_BLOCKS,
    TransportPair,
    TransportPairSource,
    digest,
    pattern,
)
from kvferry.transports.base import Completion, Segments

__all__ = ["WRITE_GRANT_CASES"]

CANARY = 77
REPEATS = 64
"""How often one write repeats the large region, so that the write cannot end by itself during the
case.
"""
UNKNOWN = 1 << 63
"""A grant id that was never granted."""
ALL_SMALL, ALL_LARGE = range(SMALL_BLOCKS), range(LARGE_BLOCKS)


def a_write_without_a_grant_is_refused_and_nothing_lands(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        for grant_id in (0, UNKNOWN, 2 * UNKNOWN - 1):
            _refused(pair, _blocks(2, 3), grant_id, f"write grant {grant_id} is not active")
        grant_id = pair.grant_writes(ALL_SMALL, ALL_LARGE)
        assert _write(pair, _blocks(2, 3), grant_id).ok, "refusals cost the writer its peer"
        _far_is(pair, _blocks(2, 3))


def a_write_outside_the_granted_blocks_is_refused_and_nothing_lands(
    source: TransportPairSource,
) -> None:
    with source.pair() as pair:
        pair.connect()
        grant_id = pair.grant_writes([3, 4, 9], [5])
        size = SMALL_BLOCK_BYTES
        for part in (
            _blocks(0, 5),
            _blocks(1, 3, 4, 5),
            _blocks(LARGE_REGION, 3),
            _blocks(LARGE_REGION, 5, 6),
            _segment(0, 3 * size - 1, size),
            _segment(0, 4 * size + 1, size),
            _segment(0, 5 * size, 1),
            _segment(0, 9 * size - 1, 1),
            _segment(0, 3 * size, 7 * size),
        ):
            _refused(pair, part, grant_id, "leaves the blocks")
        _refused(pair, _blocks(0, 3), pair.grant_writes([], [5]), "leaves the blocks")
        _refused(pair, _blocks(0, 3), pair.grant_writes(), "leaves the blocks")
        assert _write(pair, _blocks(7, 3, 9), grant_id).ok
        _far_is(pair, _blocks(7, 3, 9))


def a_write_within_the_granted_blocks_brings_exactly_the_named_bytes(
    source: TransportPairSource,
) -> None:
    with source.pair() as pair:
        pair.connect()
        grant_id = pair.grant_writes([9, 3, 4], [5, 639])
        parts = (
            _blocks(7, 3, 9),
            _blocks(LARGE_REGION, 639, 5),
            _segment(1, 4 * SMALL_BLOCK_BYTES - 100, 200),
        )
        for part in parts:
            assert _write(pair, part, grant_id).ok
        _far_is(pair, *parts)


def a_grant_revoked_before_a_write_admits_nothing(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        grant_id, other = (
            pair.grant_writes(ALL_SMALL, ALL_LARGE),
            pair.grant_writes(ALL_SMALL, ALL_LARGE),
        )
        assert pair.far.revoke_writes(grant_id) == 1, "nothing was being received"
        _refused(pair, _blocks(2, 3), grant_id, "not active")
        assert _write(pair, _blocks(2, 4), other).ok
        _far_is(pair, _blocks(2, 4))


def a_grant_revoked_after_a_write_admits_no_more(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        grant_id = pair.grant_writes(ALL_SMALL, ALL_LARGE)
        assert _write(pair, _blocks(2, 3), grant_id).ok
        assert pair.far.revoke_writes(grant_id) == 1, "nothing was being received"
        pair.far.fill_with(CANARY)
        assert not _write(pair, _blocks(2, 3), grant_id).ok
        _canary_stays(pair)


def a_grant_revoked_during_a_write_lets_no_byte_land_afterwards(
    source: TransportPairSource,
) -> None:
    with source.pair() as pair:
        pair.connect()
        grant_id = pair.grant_writes(ALL_SMALL, ALL_LARGE)
        handle = pair.near.transport.write(pair.peer, _endless(), grant_id)
        for _ in range(
            2
        ):  # the second pass is the control: while the grant is valid, bytes do land
            pair.far.fill_with(CANARY)
            _until_bytes_land(pair)
        pair.far.revoke_writes(grant_id)
        pair.far.fill_with(CANARY)
        error = pair.wait(handle)[handle].error
        assert error is not None
        assert "not active" in error, error
        for _ in range(20):
            assert pair.tick() == []
        _canary_stays(pair)
        assert _write(pair, _blocks(2, 3), pair.grant_writes([3])).ok, (
            "a revocation cost the writer its peer"
        )


def revoking_a_grant_leaves_writes_under_other_grants_alone(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        lost, kept = pair.grant_writes([], ALL_LARGE), pair.grant_writes(ALL_SMALL)
        parts = [_blocks(region, *ALL_SMALL) for region in range(LARGE_REGION)]
        doomed = pair.near.transport.write(pair.peer, _endless(), lost)
        pair.far.fill_with(CANARY)
        _until_bytes_land(pair)
        others = [pair.near.transport.write(pair.peer, parts, kept) for _ in range(6)]
        pair.far.revoke_writes(lost)
        ended = pair.wait(doomed, *others)
        assert not ended[doomed].ok
        for other in others:
            assert ended[other].ok, ended[other].error
        pair.far.fill_with(0)
        assert _write(pair, parts[0], kept).ok
        expected = np.zeros(MEMORY_BYTES, np.uint8)
        _apply(pair, parts[0], expected)
        assert pair.far.digest() == digest(expected)


def unknown_grants_can_be_revoked_too(source: TransportPairSource) -> None:
    with source.pair() as pair:
        for grant_id in (UNKNOWN, UNKNOWN, 0):
            assert pair.far.revoke_writes(grant_id) == 1
        handles = [pair.near.transport.revoke_writes(grant_id) for grant_id in (5, 5, 6)]
        assert pair.near.transport.poll_interval_s() is not None
        assert [each.handle for each in pair.near.transport.poll()] == handles
        assert pair.near.transport.poll_interval_s() is None


WRITE_GRANT_CASES = (
    Case(a_write_without_a_grant_is_refused_and_nothing_lands),
    Case(a_write_outside_the_granted_blocks_is_refused_and_nothing_lands),
    Case(a_write_within_the_granted_blocks_brings_exactly_the_named_bytes),
    Case(a_grant_revoked_before_a_write_admits_nothing),
    Case(a_grant_revoked_after_a_write_admits_no_more),
    Case(a_grant_revoked_during_a_write_lets_no_byte_land_afterwards),
    Case(revoking_a_grant_leaves_writes_under_other_grants_alone),
    Case(unknown_grants_can_be_revoked_too),
)


def _write(pair: TransportPair, part: Segments | list[Segments], grant_id: int) -> Completion:
    handle = pair.near.transport.write(
        pair.peer, [part] if isinstance(part, Segments) else part, grant_id
    )
    return pair.wait(handle)[handle]


def _refused(pair: TransportPair, part: Segments, grant_id: int, why: str) -> None:
    """Assert that a write is refused for this reason and changes no byte of the far side."""
    completion = _write(pair, part, grant_id)
    assert completion.error is not None, "a write was let in that should have been refused"
    assert why in completion.error, completion.error
    _far_is(pair)


def _far_is(pair: TransportPair, *written: Segments) -> None:
    """Assert that the far side holds its pattern, changed only by these writes."""
    expected = pattern(pair.far_seed).copy()
    for part in written:
        _apply(pair, part, expected)
    assert pair.far.digest() == digest(expected), "other bytes than the named ones were written"


def _canary_stays(pair: TransportPair) -> None:
    assert pair.far.digest() == digest(np.full(MEMORY_BYTES, CANARY, np.uint8)), (
        "bytes landed after a write grant had been revoked"
    )


def _until_bytes_land(pair: TransportPair) -> None:
    """Poll until a byte of the write in flight has landed on the far side."""
    deadline = time.monotonic() + DEADLINE_S
    while pair.far.filled_with():
        assert pair.tick() == [], "a long write has ended too early"
        assert time.monotonic() < deadline, "no byte has landed"


def _apply(
    pair: TransportPair, part: Segments, memory: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> None:
    for local, remote in zip(
        part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True
    ):
        at, origin = pair.place(part.remote_region, remote), pair.place(part.local_region, local)
        memory[at : at + part.segment_bytes] = pair.near.memory[
            origin : origin + part.segment_bytes
        ]


def _blocks(region: int, *blocks: int) -> Segments:
    size = LARGE_BLOCK_BYTES if region == LARGE_REGION else SMALL_BLOCK_BYTES
    offsets = np.array(blocks, np.int64) * size
    return Segments(region, region, size, np.sort(offsets)[::-1].copy(), offsets)


def _segment(region: int, offset: int, size: int) -> Segments:
    return Segments(region, region, size, np.zeros(1, np.int64), np.array([offset], np.int64))


def _endless() -> list[Segments]:
    return list(itertools.repeat(_blocks(LARGE_REGION, *ALL_LARGE), REPEATS))
