"""Conformance cases for data transports: the contract of `kvferry.transports.base`, which any
implementation can run.

    source = TransportPairSource(make_side, SpawnedFarSide)
    for case in CASES:
        case.run(source)      # AssertionError if the transport breaks the contract
    source.close()
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import KVFerryError, LocalProtocolError, TransportError
from kvferry.testing.transport_pairs import (
    DEADLINE_S,
    LARGE_BLOCK_BYTES,
    LARGE_BLOCKS,
    LARGE_REGION,
    SMALL_BLOCK_BYTES,
    SMALL_BLOCKS,
    SMALL_REGIONS,
    Bytes,
    InProcessFarSide,
    SpawnedFarSide,
    TransportPair,
    TransportPairSource,
    TransportSide,
    TransportSideMaker,
    digest,
    pattern,
)
from kvferry.transports.base import Completion, Handle, Segments, TransportOffer
from kvferry.types import EngineId, MemoryKind, PeerId

__all__ = [
    "CASES",
    "Case",
    "InProcessFarSide",
    "SpawnedFarSide",
    "TransportPairSource",
    "TransportSide",
    "TransportSideMaker",
]


@dataclass(frozen=True, slots=True)
class Case:
    """One clause of the contract. `run` raises AssertionError if the transport breaks it."""

    run: Callable[[TransportPairSource], None]
    needs_peer_death: bool = False
    """Run the case only with sources whose far side can die in a way that the transport notices."""

    @property
    def name(self) -> str:
        return self.run.__name__


def scattered_reads_bring_exactly_the_named_bytes(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        for segment_bytes in (512, SMALL_BLOCK_BYTES):
            _read_and_compare(
                pair,
                [
                    _scattered(region, (region + 5) % SMALL_REGIONS, segment_bytes, seed=region)
                    for region in range(3)
                ],
            )


def reads_of_neighbours_are_joined_and_equal(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        blocks = np.arange(10, 50, dtype=np.int64) * SMALL_BLOCK_BYTES
        segments = Segments(
            2,
            1,
            SMALL_BLOCK_BYTES,
            blocks[::-1].copy(),
            (blocks - 4 * SMALL_BLOCK_BYTES)[::-1].copy(),
        )
        assert _read_and_compare(pair, [segments]).segments == 1


def segments_at_odd_offsets_are_read(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        local = np.array([1, 3001, 7777], np.int64)
        _read_and_compare(pair, [Segments(0, 1, 999, local, np.array([13, 7, 250_001], np.int64))])


def a_scattered_source_fills_a_contiguous_target(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        blocks = (
            np.random.default_rng(5).permutation(SMALL_BLOCKS).astype(np.int64) * SMALL_BLOCK_BYTES
        )
        _read_and_compare(pair, [Segments(4, 7, SMALL_BLOCK_BYTES, np.sort(blocks), blocks)])


def scattered_writes_bring_exactly_the_named_bytes(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        parts = [
            _scattered(region, (region + 5) % SMALL_REGIONS, SMALL_BLOCK_BYTES, seed=region)
            for region in range(3)
        ]
        before = digest(pair.near.memory)
        if source.only_reads:
            with _raises(TransportError):
                pair.near.transport.write(pair.peer, parts)
            assert pair.far.digest() == digest(pattern(pair.far_seed)), "a refused write arrived"
            return
        handle = pair.near.transport.write(pair.peer, parts, pair.grant_all())
        completion = pair.wait(handle)[handle]
        assert completion.ok, completion.error
        assert completion.total_bytes == sum(part.total_bytes for part in parts)
        expected = pattern(pair.far_seed).copy()
        for part in parts:
            for local, remote in zip(part.local_offsets, part.remote_offsets, strict=True):
                at, origin = (
                    pair.place(part.remote_region, int(remote)),
                    pair.place(part.local_region, int(local)),
                )
                expected[at : at + part.segment_bytes] = pair.near.memory[
                    origin : origin + part.segment_bytes
                ]
        assert pair.far.digest() == digest(expected), "other bytes than the named ones were written"
        assert pair.far.digest() != digest(pattern(pair.far_seed)), "nothing was written"
        assert digest(pair.near.memory) == before, "a write changed the side it came from"


def transports_without_fencing_grant_no_writes(source: TransportPairSource) -> None:
    with source.pair() as pair:
        if pair.near.transport.supports_write_grants:
            return
        with _raises(LocalProtocolError):
            pair.near.transport.grant_writes(1, [[0]])
        with _raises(LocalProtocolError):
            pair.near.transport.revoke_writes(1)


def empty_transfers_complete_with_nothing(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        empty = np.empty(0, np.int64)
        before = digest(pair.near.memory)
        handles = [
            pair.near.transport.read(pair.peer, []),
            pair.near.transport.write(pair.peer, [Segments(0, 0, 64, empty, empty)]),
        ]
        for completion in pair.wait(*handles).values():
            assert completion.ok, completion.error
            assert (completion.total_bytes, completion.segments) == (0, 0)
        assert digest(pair.near.memory) == before
        assert pair.near.transport.poll() == []


def many_regions_move_in_one_transfer(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        _read_and_compare(
            pair,
            [
                _scattered(region, SMALL_REGIONS - 1 - region, 1024, seed=region)
                for region in range(SMALL_REGIONS)
            ],
        )


def a_large_transfer_spans_many_slices(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        _read_and_compare(pair, [_large(seed=3)])


def large_segments_of_a_large_region_are_joined(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        offsets = np.arange(LARGE_BLOCKS, dtype=np.int64) * LARGE_BLOCK_BYTES
        _read_and_compare(
            pair, [Segments(LARGE_REGION, LARGE_REGION, LARGE_BLOCK_BYTES, offsets, offsets)]
        )


def impossible_offsets_are_refused_before_anything_moves(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        before = digest(pair.near.memory)
        good, size = np.array([0], np.int64), SMALL_BLOCK_BYTES
        end = SMALL_BLOCKS * SMALL_BLOCK_BYTES
        for bad in (-1, end - size + 1, end, 2**62):
            wrong = np.array([bad], np.int64)
            _refused(pair, Segments(0, 0, size, wrong, good), LocalProtocolError)
            _refused(pair, Segments(0, 0, size, good, wrong), TransportError)
        for region in (-1, LARGE_REGION + 1):
            _refused(pair, Segments(region, 0, size, good, good), LocalProtocolError)
            _refused(pair, Segments(0, region, size, good, good), TransportError)
        _refused(pair, Segments(0, 0, 0, good, good), LocalProtocolError)
        _refused(
            pair, Segments(0, 0, size, good, np.array([0, size], np.int64)), LocalProtocolError
        )
        assert pair.tick() == []
        assert digest(pair.near.memory) == before
        _read_and_compare(pair, [_scattered(0, 1, size, seed=1)])


def a_cancelled_transfer_ends_as_cancelled_and_touches_nothing_afterwards(
    source: TransportPairSource,
) -> None:
    with source.pair() as pair:
        pair.connect()
        at_once = pair.near.transport.read(pair.peer, [_large(seed=1)])
        pair.near.transport.cancel(at_once)
        completion = pair.wait(at_once)[at_once]
        assert completion.error is not None
        assert "cancelled" in completion.error
        under_way = _begin(pair, pair.peer, seed=2)
        pair.near.transport.cancel(under_way)
        assert not pair.wait(under_way)[under_way].ok
        pair.near.memory[:] = 77
        for _ in range(20):
            assert pair.tick() == []
        assert np.all(pair.near.memory == 77), "a cancelled read wrote after it had ended"
        pair.near.transport.cancel(under_way)
        pair.near.transport.cancel(Handle(2**40))
        assert pair.tick() == []


def unknown_peers_are_refused_or_ignored(source: TransportPairSource) -> None:
    with source.pair() as pair:
        for start in (pair.near.transport.read, pair.near.transport.write):
            with _raises(TransportError):
                start(pair.peer, [_scattered(0, 0, 512, seed=1)])
        pair.near.transport.disconnect(pair.peer)
        for blob in (b"", b"garbage", pair.far.offer.blob[:-3]):
            with _raises(TransportError):
                pair.near.transport.connect(
                    pair.peer,
                    TransportOffer(pair.far.offer.transport, pair.far.offer.reach, blob),
                    pair.far.regions,
                )
        pair.connect()
        _read_and_compare(pair, [_scattered(0, 0, 512, seed=1)])


def a_disconnect_fails_transfers_in_flight(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        handle = _begin(pair, pair.peer, seed=4)
        pair.near.transport.disconnect(pair.peer)
        assert not pair.wait(handle)[handle].ok
        with _raises(TransportError):
            pair.near.transport.read(pair.peer, [_scattered(0, 0, 512, seed=1)])
        pair.connect()
        _read_and_compare(pair, [_scattered(0, 0, 512, seed=1)])


def connecting_twice_replaces_the_first_connection(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        _read_and_compare(pair, [_scattered(0, 3, 512, seed=1)])
        pair.connect()
        _read_and_compare(pair, [_scattered(1, 2, 512, seed=2)])


def two_transfers_at_once_both_arrive(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        parts = [_large(seed=6), _scattered(0, 1, 512, seed=7)]
        expected = pair.near.memory.copy()
        handles = [pair.near.transport.read(pair.peer, [part]) for part in parts]
        assert len(set(handles)) == len(parts)
        for completion in pair.wait(*handles).values():
            assert completion.ok, completion.error
        _apply(pair, parts, expected)
        _same(pair.near.memory, expected)


def a_finished_read_reports_bytes_segments_and_times(source: TransportPairSource) -> None:
    with source.pair() as pair:
        pair.connect()
        parts = [_scattered(0, 1, SMALL_BLOCK_BYTES, seed=1), _scattered(1, 2, 512, seed=2)]
        handle = pair.near.transport.read(pair.peer, parts)
        assert pair.near.transport.poll_interval_s() is not None, (
            "a transport with work to do does not ask to be polled"
        )
        completion = pair.wait(handle)[handle]
        assert completion.ok, completion.error
        assert completion.total_bytes == sum(part.total_bytes for part in parts)
        assert 1 <= completion.segments <= sum(len(part.local_offsets) for part in parts)
        assert completion.post_s >= 0.0
        assert completion.transfer_s > 0.0


def a_dead_peer_fails_its_transfers_and_no_others(source: TransportPairSource) -> None:
    with source.pair() as pair, source.disposable_far_side() as doomed:
        pair.connect()
        gone = replace(pair.peer, engine=EngineId("doomed"))
        pair.near.transport.connect(gone, doomed.offer, doomed.regions)
        lost = _begin(pair, gone, seed=8)
        doomed.die()
        assert not pair.wait(lost)[lost].ok, "a read from a dead peer succeeded"
        with _raises(TransportError):
            pair.near.transport.read(gone, [_scattered(0, 0, 512, seed=1)])
        with contextlib.suppress(
            TransportError
        ):  # transports notice a dead peer either when they connect or when they read
            pair.near.transport.connect(gone, doomed.offer, doomed.regions)
            lost = pair.near.transport.read(gone, [_scattered(0, 0, 512, seed=1)])
            assert not pair.wait(lost)[lost].ok, "a dead peer came back"
        _read_and_compare(pair, [_scattered(0, 0, 512, seed=1)])


def close_is_complete_and_idempotent(source: TransportPairSource) -> None:
    with (
        source.pair() as pair
    ):  # some libraries keep files and threads for the whole process: load them first
        pair.connect()
        _read_and_compare(pair, [_scattered(0, 0, 512, seed=1)])
    before = _held()
    with source.pair() as pair:
        pair.connect()
        _read_and_compare(pair, [_scattered(0, 0, 512, seed=1)])
        pair.near.transport.read(pair.peer, [_large(seed=9)])
        pair.tick()
        pair.near.transport.close()
        pair.near.transport.close()
        assert pair.near.transport.poll() == []
    deadline = (
        time.monotonic() + DEADLINE_S
    )  # the kernel lists a thread a moment longer than the thread can be joined
    while any(now > then for now, then in zip(_held(), before, strict=True)):
        assert time.monotonic() < deadline, (
            f"(files, threads, shared mappings) were {before} before and are {_held()}"
        )
        source.let_far_side_poll()


CASES = (
    Case(scattered_reads_bring_exactly_the_named_bytes),
    Case(reads_of_neighbours_are_joined_and_equal),
    Case(segments_at_odd_offsets_are_read),
    Case(a_scattered_source_fills_a_contiguous_target),
    Case(scattered_writes_bring_exactly_the_named_bytes),
    Case(transports_without_fencing_grant_no_writes),
    Case(empty_transfers_complete_with_nothing),
    Case(many_regions_move_in_one_transfer),
    Case(a_large_transfer_spans_many_slices),
    Case(large_segments_of_a_large_region_are_joined),
    Case(impossible_offsets_are_refused_before_anything_moves),
    Case(a_cancelled_transfer_ends_as_cancelled_and_touches_nothing_afterwards),
    Case(unknown_peers_are_refused_or_ignored),
    Case(a_disconnect_fails_transfers_in_flight),
    Case(connecting_twice_replaces_the_first_connection),
    Case(two_transfers_at_once_both_arrive),
    Case(a_finished_read_reports_bytes_segments_and_times),
    Case(a_dead_peer_fails_its_transfers_and_no_others, needs_peer_death=True),
    Case(close_is_complete_and_idempotent),
)


def _read_and_compare(pair: TransportPair, parts: Sequence[Segments]) -> Completion:
    expected = pair.near.memory.copy()
    handle = pair.near.transport.read(pair.peer, parts)
    completion = pair.wait(handle)[handle]
    assert completion.ok, completion.error
    assert completion.total_bytes == sum(part.total_bytes for part in parts)
    _apply(pair, parts, expected)
    _same(pair.near.memory, expected)
    return completion


def _apply(pair: TransportPair, parts: Sequence[Segments], memory: Bytes) -> None:
    """Apply to a copy of the near side's memory what a correct read does."""
    for part in parts:
        for local, remote in zip(
            part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True
        ):
            at = pair.place(part.local_region, local)
            memory[at : at + part.segment_bytes] = pair.far_bytes(
                part.remote_region, remote, part.segment_bytes
            )


def _same(memory: Bytes, expected: Bytes) -> None:
    assert np.array_equal(memory, expected), (
        f"{np.count_nonzero(memory != expected)} bytes are not what they should be"
    )


def _scattered(local_region: int, remote_region: int, segment_bytes: int, seed: int) -> Segments:
    """A third of the segments of a small region, in random order, to random places."""
    slots = SMALL_BLOCKS * SMALL_BLOCK_BYTES // segment_bytes
    random = np.random.default_rng(seed)
    local, remote = (
        random.permutation(slots)[: slots // 3].astype(np.int64) * segment_bytes for _ in range(2)
    )
    return Segments(local_region, remote_region, segment_bytes, local, remote)


def _large(seed: int) -> Segments:
    """All segments of the large region, shuffled."""
    random = np.random.default_rng(seed)
    local, remote = (
        random.permutation(LARGE_BLOCKS).astype(np.int64) * LARGE_BLOCK_BYTES for _ in range(2)
    )
    return Segments(LARGE_REGION, LARGE_REGION, LARGE_BLOCK_BYTES, local, remote)


def _begin(pair: TransportPair, peer: PeerId, seed: int) -> Handle:
    """Start a large read that has begun and is not over. A device may finish the read within one
    tick; then start a second read without polling.
    """
    handle = pair.near.transport.read(peer, [_large(seed)])
    ended = pair.tick()
    if not ended:
        return handle
    assert pair.far.regions[0].memory is MemoryKind.VRAM, "a large transfer was not done in slices"
    assert [(completion.handle, completion.ok) for completion in ended] == [(handle, True)]
    return pair.near.transport.read(peer, [_large(seed)])


def _refused(pair: TransportPair, part: Segments, error: type[KVFerryError]) -> None:
    for start in (pair.near.transport.read, pair.near.transport.write):
        with _raises(error):
            start(pair.peer, [_scattered(0, 0, 512, seed=1), part])


@contextlib.contextmanager
def _raises(error: type[KVFerryError]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")


def _held() -> tuple[int, int, int]:
    """The number of open files, threads, and mappings of shared files of this process."""
    with open("/proc/self/maps") as maps:
        shared = sum("memfd:" in line or "/dev/shm" in line for line in maps)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), shared
