"""Copies between a cache on a GPU and the rows of storage tiers in pinned host memory.

One kernel copies all segments of a call: kernels can access pinned host memory like device memory,
and one copy for each segment would cost the calling thread tens of microseconds. Each direction has
streams and a thread of its own. The GPU computes the checksums of the blocks in the cache: before a
block is stored, and after it was loaded. So a checksum covers the way over the bus and back, and
costs no time of a CPU.

Rows in memory that is not pinned, such as those of another engine's segment, go through a small
pinned buffer.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from kvferry.errors import LocalProtocolError
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.checksum import (
    GROUP_BYTES,
    MULTIPLIER,
    PIECE_BYTES,
    checksum_key,
    powers_of_multiplier,
)
from kvferry.transports.copy.cuda import CudaAddressCopier
from kvferry.transports.copy.gather import AddressCopies
from kvferry.transports.copy.rows import regions_of, row_segments
from kvferry.types import MemoryKind, Region

__all__ = ["CudaRowCopier", "device_checksums"]

BATCH_BYTES = 64 * 1024 * 1024
"""The most bytes of one launch. While the GPU sums one batch, it copies the next."""
BOUNCE_BYTES = 32 * 1024 * 1024
POLL_S = 0.0001
PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister."""

_log = logging.getLogger(__name__)


class CudaRowCopier:
    """Implements `transports.base.RowCopier` for a cache on one CUDA device."""

    def __init__(self, regions: Sequence[Region]) -> None:
        devices = {region.device for region in regions}
        if len(devices) != 1 or any(region.memory is not MemoryKind.VRAM for region in regions):
            raise LocalProtocolError("this copier is for a cache on one CUDA device")
        self._regions = tuple(regions)
        self._device = devices.pop()
        self._pinned: dict[int, int] = {}
        """The size of each pinned range by its address."""
        self._saving, self._loading = (_Direction(self._device, regions) for _ in range(2))

    def row_bytes(self, group: int, num_blocks: int) -> int:
        return num_blocks * sum(region.block_bytes for region in regions_of(group, self._regions))

    def save(self, rows: Sequence[RowBlocks]) -> list[int]:
        row_segments(rows, self._regions)  # checks block ids and addresses
        checksums: list[int] = []
        with self._saving as direction:
            for batch in self._batches(rows):
                size = self.row_bytes(batch[0].group, len(batch[0].block_ids))
                if self._is_pinned(batch, size):
                    direction.copy_from_cache(batch)
                else:
                    staged = direction.bounce_rows(batch, size)
                    direction.copy_from_cache(staged)
                    direction.wait()
                    for row, stage in zip(batch, staged, strict=True):
                        ctypes.memmove(row.address, stage.address, size)
                direction.sum_blocks(batch)
            checksums = direction.take_sums()
        return checksums

    def load(self, rows: Sequence[RowBlocks]) -> list[int]:
        row_segments(rows, self._regions)  # checks block ids and addresses
        with self._loading as direction:
            for batch in self._batches(rows):
                size = self.row_bytes(batch[0].group, len(batch[0].block_ids))
                source = batch
                if not self._is_pinned(batch, size):
                    direction.wait()  # an earlier batch may still use the buffer
                    source = direction.bounce_rows(batch, size)
                    for row, stage in zip(batch, source, strict=True):
                        ctypes.memmove(stage.address, row.address, size)
                direction.copy_to_cache(source)
                direction.sum_blocks(batch)
            return direction.take_sums()

    def pin(self, address: int, size_bytes: int) -> None:
        status = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, PORTABLE_AND_MAPPED))
        if status:
            _log.warning(
                "host memory of a tier cannot be pinned, so copies are slower bytes=%d "
                "cuda_error=%d",
                size_bytes,
                status,
            )
            return
        self._pinned[address] = size_bytes

    def unpin(self, address: int) -> None:
        if self._pinned.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)

    def close(self) -> None:
        """Wait for the device, then unpin all memory. Idempotent."""
        for direction in (self._saving, self._loading):
            direction.close()
        for address in list(self._pinned):
            self.unpin(address)

    def _batches(self, rows: Sequence[RowBlocks]) -> Iterator[list[RowBlocks]]:
        """Cut rows into batches of one group and one length."""
        for (group, num_blocks), alike in groupby(
            rows, lambda row: (row.group, len(row.block_ids))
        ):
            same = list(alike)
            size = self.row_bytes(group, num_blocks)
            is_pinned = self._is_pinned(same, size)
            at_once = max(1, (BATCH_BYTES if is_pinned else BOUNCE_BYTES) // max(1, size))
            for first in range(0, len(same), at_once):
                yield same[first : first + at_once]

    def _is_pinned(self, rows: Sequence[RowBlocks], size_bytes: int) -> bool:
        first = min(row.address for row in rows)
        end = max(row.address for row in rows) + size_bytes
        return any(
            address <= first and end <= address + size for address, size in self._pinned.items()
        )


# -- one direction --


class _Direction:
    """The streams, the buffer and the unfinished sums of one direction. Used by one thread at a
    time: the lock is for two callers of the same direction.
    """

    def __init__(self, device: int, regions: Sequence[Region]) -> None:
        self._device = torch.device("cuda", device)
        self._regions = tuple(regions)
        self._copier = CudaAddressCopier(device)
        self._stream = torch.cuda.Stream(self._device)
        self._blocks = {region.name: _blocks_tensor(region, self._device) for region in regions}
        self._bounce: torch.Tensor | None = None
        self._sums: list[torch.Tensor] = []
        self._job: Any = None
        self._lock = threading.Lock()

    def __enter__(self) -> "_Direction":
        self._lock.acquire()
        self._sums = []
        return self

    def __exit__(self, *failure: object) -> None:
        # The caller reuses the memory as soon as the call returns.
        try:
            if failure[0] is not None:
                self.close()
        finally:
            self._lock.release()

    def copy_from_cache(self, rows: Sequence[RowBlocks]) -> None:
        self._job = self._copier.start(
            [
                AddressCopies(size, blocks, hosts, caches, offsets)
                for size, caches, offsets, blocks, hosts in self._places(rows)
            ]
        )

    def copy_to_cache(self, rows: Sequence[RowBlocks]) -> None:
        self._job = self._copier.start(
            [
                AddressCopies(size, hosts, blocks, offsets, caches)
                for size, caches, offsets, blocks, hosts in self._places(rows)
            ]
        )
        self.wait()

    def _places(self, rows: Sequence[RowBlocks]) -> Iterator[tuple[Any, ...]]:
        """For regions of one size and stride: the size of a block, the regions' addresses, their
        offsets in a row's block, and the offsets of all blocks in cache and host.
        """
        regions = regions_of(rows[0].group, self._regions)
        total = sum(region.block_bytes for region in regions)
        ends = np.cumsum([region.block_bytes for region in regions])
        ids = np.array([row.block_ids for row in rows], np.int64)
        nth = np.arange(ids.shape[1], dtype=np.int64) * total
        hosts = (np.array([row.address for row in rows], np.int64)[:, None] + nth).ravel()
        placed = [
            (
                (region.block_bytes, region.stride_bytes),
                region.address,
                int(end) - region.block_bytes,
            )
            for region, end in zip(regions, ends, strict=True)
        ]
        for (size, stride), alike in groupby(sorted(placed), lambda place: place[0]):
            same = list(alike)
            yield (
                size,
                tuple(address for _, address, _ in same),
                tuple(offset for _, _, offset in same),
                (ids * stride).ravel(),
                hosts,
            )

    def sum_blocks(self, rows: Sequence[RowBlocks]) -> None:
        """Start the sums of the blocks of these rows, on the device."""
        regions = regions_of(rows[0].group, self._regions)
        with torch.cuda.stream(self._stream):
            ids = torch.tensor([row.block_ids for row in rows], device=self._device)
            parts = [
                device_checksums(self._blocks[region.name], ids, region.block_bytes)
                for region in regions
            ]
            self._sums.append(_fold(parts, [region.block_bytes for region in regions]))

    def take_sums(self) -> list[int]:
        """Wait for all copies and sums, and return the checksums in order."""
        self.wait()
        self._copier.wait()  # earlier jobs ran on another stream
        self._stream.synchronize()
        checksums = [int(sum_) % (1 << 64) for part in self._sums for sum_ in part.tolist()]
        self._sums = []
        return checksums

    def bounce_rows(self, rows: Sequence[RowBlocks], size_bytes: int) -> list[RowBlocks]:
        """The same rows in the pinned buffer."""
        if self._bounce is None or len(self._bounce) < len(rows) * size_bytes:
            self._bounce = torch.empty(
                max(BOUNCE_BYTES, len(rows) * size_bytes), dtype=torch.uint8, pin_memory=True
            )
        address = self._bounce.data_ptr()
        return [replace(row, address=address + n * size_bytes) for n, row in enumerate(rows)]

    def wait(self) -> None:
        """Wait until no copy is active, without occupying a processor."""
        while self._job is not None and not self._job.is_done():
            time.sleep(POLL_S)
        self._job = None

    def close(self) -> None:
        self._copier.wait()
        self._stream.synchronize()
        self._job, self._sums = None, []


@dataclass(frozen=True, slots=True)
class _Words:
    """A region in the form of CUDA's array interface: one row of 32-bit words for each block."""

    region: Region

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        region = self.region
        return {
            "shape": (region.num_blocks, region.block_bytes // 4),
            "strides": (region.stride_bytes, 4),
            "typestr": "<i4",
            "data": (region.address, False),
            "version": 3,
        }


def _blocks_tensor(region: Region, device: torch.device) -> torch.Tensor:
    if region.block_bytes % GROUP_BYTES or region.stride_bytes % 4:
        raise LocalProtocolError(
            f"blocks of region {region.name} have {region.block_bytes} bytes, which is not a "
            f"multiple of {GROUP_BYTES}"
        )
    return torch.as_tensor(_Words(region), device=device)


# -- checksums --
# The definition is in `copy/checksum.py`. torch has no unsigned 64-bit arithmetic, but signed
# numbers wrap around in the same way.


def device_checksums(blocks: torch.Tensor, ids: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """Return the checksum of each chosen block, in the shape of `ids`. `blocks` has one row of
    32-bit words for each block.
    """
    words = blocks.index_select(0, ids.reshape(-1))
    key = torch.from_numpy(checksum_key().view(np.int32).copy()).to(blocks.device)
    piece_words = PIECE_BYTES // 4
    values = [
        _piece_values(words[:, first : first + piece_words], key)
        for first in range(0, block_bytes // 4, piece_words)
    ]
    sums = torch.zeros_like(values[0])
    for value in values:
        sums = (sums + value) * _signed(MULTIPLIER)
    return sums.reshape(ids.shape)


def _piece_values(words: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """v of one piece of each block."""
    count = words.shape[1]
    half = GROUP_BYTES // 8
    mixed = (words ^ key[:count]).reshape(len(words), -1, 2, half).to(torch.int64)
    factors = (mixed & 0xFFFFFFFF) + (1 << 32)
    products = factors[:, :, 0] * factors[:, :, 1]
    return products.sum(dim=(1, 2)) + 4 * count


def _fold(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """The checksums of rows from those of their segments: parts[region][row, block]."""
    pieces = [-(-size // PIECE_BYTES) for size in sizes]
    powers = powers_of_multiplier(sum(pieces)).astype(np.int64)
    total = torch.zeros_like(parts[0][:, 0])
    for block in range(parts[0].shape[1]):
        for part, count in zip(parts, pieces, strict=True):
            total = total * int(powers[count]) + part[:, block]
    return total


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
