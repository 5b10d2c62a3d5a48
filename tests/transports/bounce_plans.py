"""Random plans over the memory of the conformance suite. A transport with bounce buffers reads and
writes them, and every byte is compared. Works for host and device memory.
"""

from collections.abc import Sequence

import numpy as np

from kvferry.testing.transport_pairs import (
    LARGE_BLOCK_BYTES,
    LARGE_BLOCKS,
    LARGE_REGION,
    Bytes,
    TransportPair,
    digest,
    pattern,
)
from kvferry.transports.base import Completion, Segments

LARGE_BYTES = LARGE_BLOCKS * LARGE_BLOCK_BYTES


def shuffled(segment_bytes: int, seed: int, count: int | None = None) -> list[Segments]:
    """Return a plan that moves the segments of the large region between random places."""
    random, slots = np.random.default_rng(seed), LARGE_BYTES // segment_bytes
    local, remote = (
        random.permutation(slots)[:count].astype(np.int64) * segment_bytes for _ in range(2)
    )
    return [Segments(LARGE_REGION, LARGE_REGION, segment_bytes, local, remote)]


def mixed(seed: int) -> list[Segments]:
    """Return segments of several sizes, some odd, in disjoint parts of the large region."""
    random, part_bytes, made = np.random.default_rng(seed), LARGE_BYTES // 6, []
    for number, segment_bytes in enumerate((1, 333, 4096, 12_288, 65_536, 1000)):
        slots = min(3000, part_bytes // segment_bytes)
        local, remote = (
            random.permutation(slots)[: slots // 2].astype(np.int64) * segment_bytes
            + number * part_bytes
            for _ in range(2)
        )
        made.append(Segments(LARGE_REGION, LARGE_REGION, segment_bytes, local, remote))
    return made


def read_as_planned(pair: TransportPair, plan: Sequence[Segments]) -> Bytes:
    """Return the expected content of our memory after a read of the plan."""
    memory = np.array(pair.near.memory)
    for part in plan:
        here, there = (pair.place(region, 0) for region in (part.local_region, part.remote_region))
        _copy(
            memory[here:],
            part.local_offsets,
            pattern(pair.far_seed)[there:],
            part.remote_offsets,
            part.segment_bytes,
        )
    return memory


def check_read(pair: TransportPair, plan: Sequence[Segments]) -> Completion:
    expected = read_as_planned(pair, plan)
    handle = pair.near.transport.read(pair.peer, plan)
    completion = pair.wait(handle)[handle]
    _check_told(completion, plan)
    assert np.array_equal(np.array(pair.near.memory), expected), (
        "other bytes than the named ones have come"
    )
    return completion


def check_write(pair: TransportPair, plan: Sequence[Segments]) -> Completion:
    expected, near = pattern(pair.far_seed).copy(), np.array(pair.near.memory)
    for part in plan:
        here, there = (pair.place(region, 0) for region in (part.local_region, part.remote_region))
        _copy(
            expected[there:],
            part.remote_offsets,
            near[here:],
            part.local_offsets,
            part.segment_bytes,
        )
    handle = pair.near.transport.write(pair.peer, plan)
    completion = pair.wait(handle)[handle]
    _check_told(completion, plan)
    assert pair.far.digest() == digest(expected), "other bytes than the named ones were written"
    return completion


def _check_told(completion: Completion, plan: Sequence[Segments]) -> None:
    assert completion.ok, completion.error
    assert completion.total_bytes == sum(part.total_bytes for part in plan)
    num_segments = sum(len(part.local_offsets) for part in plan)
    assert completion.segments != num_segments, (
        f"{completion.segments} descriptors for as many segments: it used no bounce buffer"
    )


def _copy(
    target: Bytes, targets: np.ndarray, source: Bytes, sources: np.ndarray, size: int
) -> None:
    columns, step = np.arange(size), max(1, (8 << 20) // size)
    for first in range(0, len(targets), step):
        to, of = (part[first : first + step, None] + columns for part in (targets, sources))
        target[to] = source[of]
