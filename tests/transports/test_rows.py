"""Tests of copies between a cache in host memory and rows: exactly the named bytes, checksums that
find any changed bit, and checksums of the bytes that arrived even if the source changes meanwhile.
"""

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.checksum import (
    GROUP_BYTES,
    MULTIPLIER,
    PIECE_BYTES,
    Checksums,
    checksum_key,
    row_checksums,
    segment_checksum,
)
from kvferry.transports.copy.native import native_or
from kvferry.transports.copy.rows import CopyAndSum, CpuRowCopier, copy_and_sum_by_numpy
from kvferry.types import MemoryKind, Region

Bytes = npt.NDArray[np.uint8]
COPIES: dict[str, CopyAndSum] = {
    "numpy": copy_and_sum_by_numpy,
    "fastest": native_or("copy_and_sum", copy_and_sum_by_numpy),
}
copies = pytest.mark.parametrize("copy_and_sum", COPIES.values(), ids=COPIES)
lengths = st.one_of(
    st.integers(0, 200),
    st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 70, 16384]),
)


def random_bytes(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def by_definition(segments: Sequence[bytes]) -> int:
    """The slow reference, directly from the definition, with Python's integers."""
    key = checksum_key().tolist()
    checksum = 0
    for segment in segments:
        for start in range(0, len(segment), PIECE_BYTES):
            piece = segment[start : start + PIECE_BYTES]
            padded = piece + bytes(-len(piece) % GROUP_BYTES)
            words = [
                int.from_bytes(padded[at : at + 4], "little") ^ key[at // 4]
                for at in range(0, len(padded), 4)
            ]
            value = len(piece) + sum(
                (2**32 + words[group + i]) * (2**32 + words[group + i + 8])
                for group in range(0, len(words), 16)
                for i in range(8)
            )
            checksum = (checksum + value) * MULTIPLIER % 2**64
    return checksum


def checksum_of(segments: Sequence[Bytes]) -> int:
    sums = np.array([segment_checksum(segment) for segment in segments], np.uint64)
    return one_row(sums, segments)


def one_row(sums: Checksums, segments: Sequence[Bytes]) -> int:
    sizes = np.array([len(segment) for segment in segments], np.int64)
    return int(row_checksums(sums, sizes, np.array([len(segments)]))[0])


def copied(copy_and_sum: CopyAndSum, segments: Sequence[Bytes]) -> tuple[list[Bytes], int]:
    """Copy the segments as one row; returns the copies and the checksum."""
    targets = [np.zeros_like(segment) for segment in segments]
    sums = np.zeros(len(segments), np.uint64)
    copy_and_sum(
        np.array([target.ctypes.data for target in targets], np.int64),
        np.array([segment.ctypes.data for segment in segments], np.int64),
        np.array([len(segment) for segment in segments], np.int64),
        sums,
    )
    return targets, one_row(sums, segments)


# -- checksums --


@copies
@given(st.lists(lengths, max_size=5), st.integers(0, 2**32), st.integers(0, 9))
def test_native_numpy_and_definition_agree(
    copy_and_sum: CopyAndSum, sizes: list[int], seed: int, skew: int
) -> None:
    # Segments start at any address, also at addresses that are not aligned.
    segments = [random_bytes(size + skew, seed + n)[skew:] for n, size in enumerate(sizes)]
    targets, checksum = copied(copy_and_sum, segments)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(targets, segments, strict=True))
    assert checksum == checksum_of(segments)
    assert checksum == by_definition([segment.tobytes() for segment in segments])


@copies
@pytest.mark.parametrize("content", ["zeros", "ones", "key", "random"])
def test_every_flipped_bit_is_found(copy_and_sum: CopyAndSum, content: str) -> None:
    size = PIECE_BYTES + 100
    row = {
        "zeros": np.zeros(size, np.uint8),
        "ones": np.full(size, 255, np.uint8),
        # All products of this content are the smallest possible.
        "key": np.resize(checksum_key().view(np.uint8), size).copy(),
        "random": random_bytes(size),
    }[content]
    _, before = copied(copy_and_sum, [row])
    step = 5 if copy_and_sum is not copy_and_sum_by_numpy else 37
    for bit in range(0, 8 * size, step):
        row[bit // 8] ^= 1 << bit % 8
        assert copied(copy_and_sum, [row])[1] != before, bit
        row[bit // 8] ^= 1 << bit % 8
    assert copied(copy_and_sum, [row])[1] == before


@copies
@given(st.data(), st.integers(1, 300))
def test_any_change_of_one_word_is_found(
    copy_and_sum: CopyAndSum, data: st.DataObject, num_words: int
) -> None:
    words = random_bytes(4 * num_words, num_words)
    _, before = copied(copy_and_sum, [words])
    at = 4 * data.draw(st.integers(0, num_words - 1))
    word = np.frombuffer(data.draw(st.binary(min_size=4, max_size=4)), np.uint8)
    is_same = np.array_equal(words[at : at + 4], word)
    words[at : at + 4] = word
    assert (copied(copy_and_sum, [words])[1] == before) is is_same


@copies
def test_order_length_and_cut_matter(copy_and_sum: CopyAndSum) -> None:
    a, b, c = (random_bytes(PIECE_BYTES, seed) for seed in (1, 2, 3))
    zeros = np.zeros(PIECE_BYTES, np.uint8)
    swapped_words = a.copy()
    swapped_words[:4], swapped_words[64:68] = a[64:68], a[:4]
    swapped_pair = a.copy()
    swapped_pair[:4], swapped_pair[32:36] = a[32:36], a[:4]
    rows = [
        [a, b, c], [b, a, c], [a, c, b], [np.concatenate([b, a]), c],
        [a], [swapped_words], [swapped_pair], [], [zeros], [zeros[:-1]], [zeros[:8]], [zeros[:1]],
        [zeros, zeros], [zeros[:8], zeros[:8]], [zeros[:16]], [zeros[:4000], zeros[:96]],
    ]  # fmt: skip
    checksums = [copied(copy_and_sum, row)[1] for row in rows]
    # Two segments of whole pieces have the checksum of one long segment; all others differ.
    assert checksums[1] == checksums[3]
    assert len({*checksums}) == len(rows) - 1


@pytest.mark.parametrize(
    "rows",
    [[(100, 5000), (100, 5000)], [(100, 5000), (5000, 100)], [(64, 64), (64,), (64, 64, 64)],
     [(64,), (), (64,)], [(), (64,)], [(), ()], [], [(9000, 1, 0, 8192), (3,)]],
)  # fmt: skip
def test_the_rows_of_one_copy_may_have_different_segments(rows: list[tuple[int, ...]]) -> None:
    contents = [[random_bytes(size, n) for n, size in enumerate(row)] for row in rows]
    segments = [segment for row in contents for segment in row]
    checksums = row_checksums(
        np.array([segment_checksum(segment) for segment in segments], np.uint64),
        np.array([len(segment) for segment in segments], np.int64),
        np.cumsum(np.array([len(row) for row in rows], np.int64)),
    )
    assert checksums.tolist() == [
        by_definition([segment.tobytes() for segment in row]) for row in contents
    ]


# -- rows --


class Cache:
    """Two KV-cache groups in host memory: group 0 has three regions, group 1 has one."""

    def __init__(self, seed: int = 0, num_blocks: int = 7) -> None:
        self.regions: list[Region] = []
        self.memory: list[Bytes] = []
        for name, group, block_bytes, gap in (
            ("a", 0, 100, 0), ("b", 1, 5000, 8), ("c", 0, 64, 28), ("d", 0, 4096, 0),
        ):  # fmt: skip
            stride = block_bytes + gap
            memory = random_bytes(stride * num_blocks, 10 * seed + len(self.memory))
            self.memory.append(memory)
            self.regions.append(
                Region(name, memory.ctypes.data, block_bytes, stride, num_blocks, group=group)
            )

    def block(self, region: int, block: int) -> bytes:
        where = self.regions[region]
        start = block * where.stride_bytes
        return self.memory[region][start : start + where.block_bytes].tobytes()

    def row(self, group: int, block_ids: Sequence[int]) -> bytes:
        indexes = [n for n, region in enumerate(self.regions) if region.group == group]
        return b"".join(self.block(n, block) for block in block_ids for n in indexes)


@copies
def test_rows_come_back_as_they_were(copy_and_sum: CopyAndSum) -> None:
    cache, other = Cache(1), Cache(2)
    copier, loader = (CpuRowCopier(each.regions, copy_and_sum) for each in (cache, other))
    plan = [(0, (3,)), (0, (0,)), (1, (2, 6)), (0, (5, 1)), (1, (4, 0))]
    sizes = [copier.row_bytes(group, len(ids)) for group, ids in plan]
    assert sizes == [4260, 4260, 10000, 8520, 10000]
    rows = [np.zeros(size + 10, np.uint8) for size in sizes]
    wanted = [RowBlocks(row.ctypes.data, *what) for row, what in zip(rows, plan, strict=True)]
    saved = copier.save(wanted)
    for row, size, (group, ids) in zip(rows, sizes, plan, strict=True):
        assert row[:size].tobytes() == cache.row(group, ids)
        assert not row[size:].any()
    before = [memory.copy() for memory in other.memory]
    assert loader.load(wanted) == saved
    assert len({*saved}) == len(saved)
    for n, region in enumerate(other.regions):
        loaded = {block for group, ids in plan if group == region.group for block in ids}
        untouched = before[n].reshape(region.num_blocks, -1).copy()
        now = other.memory[n].reshape(region.num_blocks, -1)
        for block in loaded:
            assert other.block(n, block) == cache.block(n, block)
            untouched[block, : region.block_bytes] = now[block, : region.block_bytes]
        assert np.array_equal(now, untouched)


@copies
def test_rows_and_blocks_that_do_not_exist_are_refused_before_any_copy(
    copy_and_sum: CopyAndSum,
) -> None:
    cache = Cache()
    copier = CpuRowCopier(cache.regions, copy_and_sum)
    row = np.zeros(20_000, np.uint8)
    good = RowBlocks(row.ctypes.data, 0, (1,))
    for wrong in (
        RowBlocks(row.ctypes.data, 0, (7,)),
        RowBlocks(row.ctypes.data, 0, (-1,)),
        RowBlocks(row.ctypes.data, 1, (0, 7)),
        RowBlocks(row.ctypes.data, 2, (0,)),
        RowBlocks(0, 0, (0,)),
        RowBlocks(-5, 0, (0,)),
        RowBlocks(2**63 - 100, 0, (0,)),
    ):
        with pytest.raises(LocalProtocolError):
            copier.save([good, wrong])
        assert not row.any()
    assert copier.save([]) == []
    assert copier.save([RowBlocks(row.ctypes.data, 0, ())]) == [checksum_of([])]


def test_a_cache_on_a_device_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="host memory"):
        CpuRowCopier([Region("a", 4096, 8, 8, 1, MemoryKind.VRAM)])


def test_the_native_copy_refuses_segments_that_are_not_equally_many() -> None:
    compiled = pytest.importorskip(
        "kvferry.transports.copy._copy", reason="kvferry was installed without a compiler"
    )
    address = np.zeros(64, np.uint8).ctypes.data
    for counts in ((1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 0)):
        arrays = [np.full(count, address, np.int64) for count in counts]
        with pytest.raises(ValueError, match="equally many"):
            compiled.copy_and_sum(*arrays[:3], arrays[3].view(np.uint64))


@copies
def test_the_checksum_is_of_the_bytes_that_arrived_even_if_the_row_changes_meanwhile(
    copy_and_sum: CopyAndSum,
) -> None:
    size = 1 << 20
    source, target = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    copier = CpuRowCopier([Region("a", target.ctypes.data, size, size, 1)], copy_and_sum)
    unmixed = {checksum_of([np.full(size, value, np.uint8)]) for value in range(256)}
    is_over = threading.Event()

    def overwrite() -> None:
        value = 0
        while not is_over.is_set():
            value = (value + 1) % 256
            source.fill(value)

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        num_mixed = 0
        for _ in range(100_000):
            [checksum] = copier.load([RowBlocks(source.ctypes.data, 0, (0,))])
            assert checksum == checksum_of([target])
            is_mixed = bool(target.min() != target.max())
            assert (checksum not in unmixed) is is_mixed
            num_mixed += int(is_mixed)
            if num_mixed >= 20:
                break
    finally:
        is_over.set()
        writer.join()
    assert num_mixed >= 20, "the writer never changed the row during a copy"
