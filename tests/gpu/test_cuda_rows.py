"""Tests the copies between a cache on a CUDA device and rows in host memory: they move the right
bytes, and their checksums are those of the definition.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.cuda_rows import CudaRowCopier
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.transports.shm import SharedMemory
from kvferry.types import MemoryKind, Region

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

LAYERS, NUM_BLOCKS, BLOCKS_PER_ROW, NUM_ROWS = 3, 64, 2, 16


class DeviceCache:
    """A cache on the device, whose blocks interleave the layers, and rows in shared memory."""

    def __init__(self, block_bytes: int, is_pinned: bool) -> None:
        self.blocks = torch.randint(
            0, 256, (NUM_BLOCKS, LAYERS, block_bytes), dtype=torch.uint8, device="cuda"
        )
        self.row_bytes = BLOCKS_PER_ROW * LAYERS * block_bytes
        self.memory = SharedMemory.allocate(NUM_ROWS * self.row_bytes)
        self.regions = [
            Region(
                f"layer {i}",
                self.blocks.data_ptr() + i * block_bytes,
                block_bytes,
                LAYERS * block_bytes,
                NUM_BLOCKS,
                MemoryKind.VRAM,
            )
            for i in range(LAYERS)
        ]
        self.copier = CudaRowCopier(self.regions)
        if is_pinned:
            self.copier.pin(self.memory.address, self.memory.size_bytes)

    def rows(self, seed: int) -> list[RowBlocks]:
        """All rows, with different blocks."""
        ids = np.random.default_rng(seed).permutation(NUM_BLOCKS)
        return [
            RowBlocks(
                self.memory.address + n * self.row_bytes,
                0,
                tuple(ids[BLOCKS_PER_ROW * n : BLOCKS_PER_ROW * (n + 1)].tolist()),
            )
            for n in range(NUM_ROWS)
        ]

    def on_host(self) -> tuple[torch.Tensor, CpuRowCopier]:
        """A copy of the cache in host memory, and a copier for it."""
        copy = self.blocks.cpu()
        shift = copy.data_ptr() - self.blocks.data_ptr()
        regions = [
            replace(region, address=region.address + shift, memory=MemoryKind.DRAM)
            for region in self.regions
        ]
        return copy, CpuRowCopier(regions)

    def row(self, n: int) -> bytes:
        return bytes(self.memory.buffer[n * self.row_bytes : (n + 1) * self.row_bytes])

    def close(self) -> None:
        self.copier.close()
        self.copier.close()
        self.memory.close()


@pytest.fixture(params=[64, 4096, 16384, 20480, 1 << 20])
def block_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[True, False], ids=["pinned", "not pinned"])
def cache(request: pytest.FixtureRequest, block_bytes: int) -> Iterator[DeviceCache]:
    made = DeviceCache(block_bytes, request.param)
    yield made
    made.close()


def test_rows_hold_the_bytes_of_their_blocks_and_the_checksums_are_those_of_a_cpu(
    cache: DeviceCache,
) -> None:
    rows = cache.rows(seed=1)
    before = cache.blocks.cpu()
    checksums = cache.copier.save(rows)
    for n, row in enumerate(rows):
        assert cache.row(n) == before[list(row.block_ids)].numpy().tobytes()
    host_copy, host_copier = cache.on_host()
    assert checksums == host_copier.save(rows)
    assert torch.equal(host_copy, before)


def test_loaded_blocks_are_those_that_were_saved(cache: DeviceCache) -> None:
    rows, before = cache.rows(seed=2), cache.blocks.cpu()
    checksums = cache.copier.save(rows)
    cache.blocks.random_(0, 256)
    untouched = cache.blocks.cpu()
    assert cache.copier.load(rows) == checksums
    used = sorted(block for row in rows for block in row.block_ids)
    others = sorted(set(range(NUM_BLOCKS)) - set(used))
    assert torch.equal(cache.blocks.cpu()[used], before[used])
    assert torch.equal(cache.blocks.cpu()[others], untouched[others])


def test_one_changed_bit_in_a_row_changes_the_checksum_of_its_load(cache: DeviceCache) -> None:
    rows = cache.rows(seed=3)
    checksums = cache.copier.save(rows)
    cache.memory.buffer[5 * cache.row_bytes + cache.row_bytes // 3] ^= 16
    loaded = cache.copier.load(rows)
    assert [n for n in range(NUM_ROWS) if loaded[n] != checksums[n]] == [5]


def test_rows_are_right_while_other_work_keeps_the_device_busy() -> None:
    """The copies use memory that torch may have taken back from that work a moment ago."""
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    cache = DeviceCache(1 << 20, is_pinned=True)
    before, rows = cache.blocks.cpu(), cache.rows(seed=5)
    for _ in range(3):
        for _ in range(40):
            matrix = (matrix @ matrix).relu()
        checksums = cache.copier.save(rows)
        for n, row in enumerate(rows):
            assert cache.row(n) == before[list(row.block_ids)].numpy().tobytes()
        assert cache.copier.load(rows) == checksums
    cache.close()


def test_repeated_copies_take_no_more_memory() -> None:
    cache = DeviceCache(1 << 20, is_pinned=True)
    rows = cache.rows(seed=6)
    cache.copier.save(rows)
    cache.copier.load(rows)
    held = torch.cuda.memory_allocated()
    for _ in range(5):
        cache.copier.save(rows)
        cache.copier.load(rows)
    assert torch.cuda.memory_allocated() == held
    cache.close()


def test_blocks_that_do_not_exist_are_refused_before_any_copy(cache: DeviceCache) -> None:
    before = cache.blocks.clone()
    rows = [replace(cache.rows(seed=4)[0], block_ids=(0, NUM_BLOCKS))]
    with pytest.raises(LocalProtocolError):
        cache.copier.load(rows)
    with pytest.raises(LocalProtocolError):
        cache.copier.save(rows)
    assert torch.equal(cache.blocks, before)
