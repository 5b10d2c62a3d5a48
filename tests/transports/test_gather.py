"""Tests that exactly the named bytes are copied for any pattern of offsets, in bounded slices, with
and without the native function.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transports.base import Operation, Segments
from kvferry.transports.copy.gather import (
    SLICE_BYTES,
    Copier,
    copy_by_numpy,
    copy_in_slices,
    fastest_copier,
)

COPIERS = {"numpy": copy_by_numpy, "fastest": fastest_copier()}
copiers = pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)


def expected_after(
    part: Segments, local: np.ndarray, remote: np.ndarray, operation: Operation
) -> np.ndarray:
    target, source = (
        (local.copy(), remote) if operation is Operation.READ else (remote.copy(), local)
    )
    for near, far in zip(part.local_offsets.tolist(), part.remote_offsets.tolist(), strict=True):
        to, origin = (near, far) if operation is Operation.READ else (far, near)
        target[to : to + part.segment_bytes] = source[origin : origin + part.segment_bytes]
    return target


@copiers
@settings(deadline=None)
@given(
    st.data(),
    st.sampled_from(Operation),
    st.sampled_from([1, 3, 64, 200, 4096]),
    st.integers(0, 3),
)
def test_exactly_the_named_bytes_are_copied(
    copier: Copier, data: st.DataObject, operation: Operation, segment_bytes: int, skew: int
) -> None:
    slots = 60
    size = (slots + 1) * segment_bytes + 3
    local, remote = (
        np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8) for seed in (1, 2)
    )
    count = data.draw(st.integers(0, slots))
    near = (
        np.array(data.draw(st.permutations(range(slots)))[:count], np.int64) * segment_bytes + skew
    )
    far = np.array(data.draw(st.permutations(range(slots)))[:count], np.int64) * segment_bytes
    if data.draw(st.booleans()):
        near, far = np.sort(near), np.sort(far)
    part = Segments(0, 0, segment_bytes, near, far)
    expected = expected_after(part, local, remote, operation)
    sides = (
        ([part.swapped()], [remote], [local])
        if operation is Operation.READ
        else ([part], [local], [remote])
    )
    moved = list(copy_in_slices(*sides, copier))
    assert np.array_equal(local if operation is Operation.READ else remote, expected)
    assert sum(size for size, _ in moved) == part.total_bytes
    assert sum(copies for _, copies in moved) <= count


@copiers
@pytest.mark.parametrize("segment_bytes", [4096, 16384, 65536, 8 * 1024 * 1024])
@pytest.mark.parametrize("shape", ["scattered", "to runs", "neighbours"])
def test_every_slice_is_bounded(copier: Copier, segment_bytes: int, shape: str) -> None:
    slots = 3 * SLICE_BYTES // min(segment_bytes, SLICE_BYTES)
    random = np.random.default_rng(0)
    near = np.arange(slots, dtype=np.int64) * segment_bytes
    far = near if shape == "neighbours" else random.permutation(near)
    near = random.permutation(near) if shape == "scattered" else near
    local, remote = (
        np.zeros(slots * segment_bytes, np.uint8),
        random.integers(0, 256, slots * segment_bytes, dtype=np.uint8),
    )
    part = Segments(0, 0, segment_bytes, near, far)
    sizes = [size for size, _ in copy_in_slices([part.swapped()], [remote], [local], copier)]
    assert max(sizes) <= SLICE_BYTES
    assert len(sizes) >= 3
    rows = local.reshape(slots, segment_bytes)
    assert np.array_equal(
        rows[near // segment_bytes], remote.reshape(slots, segment_bytes)[far // segment_bytes]
    )


@copiers
def test_neighbours_are_one_copy_whichever_side_is_sorted(copier: Copier) -> None:
    offsets = np.array([30, 10, 20, 0], np.int64)
    local, remote = np.zeros(40, np.uint8), np.arange(50, dtype=np.uint8)
    part = Segments(0, 0, 10, offsets, offsets + 5)
    moved = list(copy_in_slices([part.swapped()], [remote], [local], copier))
    assert moved == [(40, 1)]
    assert np.array_equal(local, remote[5:45])


@copiers
def test_regions_with_the_same_and_other_blocks_are_each_copied_as_asked(copier: Copier) -> None:
    random = np.random.default_rng(0)
    here, there = ([*random.integers(0, 256, (4, 100), dtype=np.uint8)] for _ in range(2))
    first, second = np.array([30, 0], np.int64), np.array([50, 80], np.int64)
    plan = [(first, second), (first, second), (second, first), (first, first)]
    parts = [Segments(n, n, 10, *sides) for n, sides in enumerate(plan)]
    expected = [
        expected_after(part, here[n], there[n], Operation.READ) for n, part in enumerate(parts)
    ]
    swapped = [part.swapped() for part in parts]
    assert [moved for moved, _ in copy_in_slices(swapped, there, here, copier)] == [20] * 4
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(here, expected, strict=True))


def test_the_compiled_loop_copies_all_runs_or_none() -> None:
    compiled = pytest.importorskip(
        "kvferry.transports.copy._copy", reason="kvferry was installed without a compiler"
    )
    source = np.arange(256, dtype=np.uint8)
    good = [0, 100], [50, 10], [20, 100]
    for wrong in (
        ([0, 157], [0, 0], [20, 100]),
        ([0, -1], [0, 0], [20, 100]),
        ([0, 0], [0, 157], [20, 100]),
        ([0, 0], [0, -1], [20, 100]),
        ([0, 0], [0, 0], [20, -1]),
        ([0, 0], [0, 0], [20, 257]),
        ([0, 2**63 - 1], [0, 2**63 - 1], [20, 2**63 - 1]),
        ([0], [0, 0], [20, 100]),
    ):
        target = np.zeros(256, np.uint8)
        with pytest.raises(ValueError, match=r"run leaves|equally many"):
            compiled.copy_segments(target, source, *(np.array(each, np.int64) for each in wrong))
        assert not target.any()
    target = np.zeros(256, np.uint8)
    compiled.copy_segments(target, source, *(np.array(each, np.int64) for each in good))
    assert np.array_equal(target[:20], source[50:70])
    assert np.array_equal(target[100:200], source[10:110])
    assert not target[20:100].any()
    assert not target[200:].any()


def test_the_compiled_loop_refuses_memory_that_may_not_be_written() -> None:
    compiled = pytest.importorskip(
        "kvferry.transports.copy._copy", reason="kvferry was installed without a compiler"
    )
    with pytest.raises(TypeError):
        compiled.copy_segments(b"read only", b"something", *(np.zeros(1, np.int64),) * 3)
