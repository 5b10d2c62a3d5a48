"""Copies within this process: between mapped regions, and between addresses.

The thread that owns a transport calls everything in this module. The native and the numpy copier
both release the GIL while they copy.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.sleep import short_sleep
from kvferry.transports.base import Segments
from kvferry.transports.copy.native import native_or
from kvferry.transports.copy.segments import (
    Bytes,
    Descriptors,
    Offsets,
    are_within,
    batches,
    coalesce,
    group_by_offsets,
)
from kvferry.types import Region


class AddressedMemory:
    """A range of this process's memory, accessed by address. The range may have gaps: the caller
    has checked that the addresses it passes are mapped.
    """

    def __init__(self, first: int, size_bytes: int) -> None:
        self._first = first
        self._bytes = memoryview((ctypes.c_uint8 * size_bytes).from_address(first)).cast("B")

    def views(self, addresses: Iterable[int], sizes: Iterable[int]) -> list[memoryview]:
        memory, first = self._bytes, self._first
        return [
            memory[address - first : address - first + size]
            for address, size in zip(addresses, sizes, strict=True)
        ]


def bytes_at(address: int, size_bytes: int) -> Bytes:
    """Return a view of memory, which is valid only while the memory is; nothing checks that."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def region_view(region: Region) -> Bytes:
    """Return a view from the region's first block to its last."""
    if region.size_bytes <= 0:
        raise LocalProtocolError(f"region {region.name!r} is empty")
    return bytes_at(region.address, region.size_bytes)


# -- copiers --
# Copy a batch of descriptors: by the native function, or by numpy if kvferry was installed without
# a compiler. Why there is a native function, and how much faster it is:
# docs/decisions/018-copies-by-a-compiled-loop.md.


CopySegments = Callable[[Bytes, Bytes, Offsets, Offsets, Offsets], None]


class Copier(Protocol):
    """Copies a batch of descriptors between two buffers."""

    def __call__(self, target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
        """Copy each segment from offset `local` of the source to offset `remote` of the target. The
        caller has checked that every segment lies in both buffers.
        """


def fastest_copier() -> Copier:
    copy_segments: CopySegments | None = native_or("copy_segments", None)
    if copy_segments is None:
        return copy_by_numpy

    def copy_compiled(target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
        copy_segments(target, source, descriptors.remote, descriptors.local, descriptors.size_bytes)

    return copy_compiled


def copy_by_numpy(target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
    for origin, to, size in zip(
        descriptors.local.tolist(),
        descriptors.remote.tolist(),
        descriptors.size_bytes.tolist(),
        strict=True,
    ):
        target[to : to + size] = source[origin : origin + size]


# -- copies between regions --
# Copy segments between two mapped regions, in slices, at the speed of memory. Segments that are
# adjacent on both sides are joined first. The rest is copied in the order of the source: a
# processor prefetches well only where the addresses it reads ascend, while the order of the writes
# hardly matters. `kvferry bench transfer` compares the speed with memcpy.


SLICE_BYTES = 16 * 1024 * 1024
"""Most bytes in one slice: about a millisecond, so that no message waits long for a transfer. Each
slice evicts the processor's caches, which makes the interpreter slow between two slices, so there
should be few slices.
"""

SLICE_COST = 128 * 1024
"""Overhead of one slice (a few calls in the interpreter), expressed as the number of bytes that
could be copied in that time.
"""


def copy_in_slices(
    segments: Sequence[Segments],
    sources: Sequence[Bytes],
    targets: Sequence[Bytes],
    copier: Copier,
) -> Iterator[tuple[int, int]]:
    """Copy checked segments from their local regions (`sources`) to their remote regions
    (`targets`), one slice at each step; yields its bytes and its number of copies. Regions that
    share their offsets are cut into slices once: layers mostly move the same blocks.
    """
    for group in group_by_offsets(segments):
        descriptors = coalesce(group[0])
        slices = [
            (part, part.total_bytes)
            for part in batches(descriptors, SLICE_BYTES, max(1, len(descriptors)))
        ]
        for same in group:
            source, target = sources[same.local_region], targets[same.remote_region]
            for part, total_bytes in slices:
                copier(target, source, part)
                yield total_bytes, len(part)


# -- copies between addresses --
# Many segments of one size, from any address to any address, submitted together. The layers of a
# cache mostly move the same blocks, so one array of offsets can serve several places (pairs of base
# addresses). Bounce-buffer transfers gather and scatter in this way, and the `cuda_ipc` transport
# copies from and to a peer on the same host in this way. One thread makes all calls.


MAX_OFFSET = (1 << 63) - 1


class AddressCopies(NamedTuple):
    """Copies of one size: for every place `p`, copy `i` moves `size_bytes` bytes from address
    `source_bases[p] + sources[i]` to `target_bases[p] + targets[i]`. The addresses are valid in
    this process for all offsets from 0 to `source_last` and `target_last`.
    """

    size_bytes: int
    sources: Offsets
    targets: Offsets
    source_bases: tuple[int, ...] = (0,)
    target_bases: tuple[int, ...] = (0,)
    source_last: int = MAX_OFFSET
    target_last: int = MAX_OFFSET

    @property
    def num_rows(self) -> int:
        """Number of segments in each place."""
        return len(self.sources)

    @property
    def num_places(self) -> int:
        return len(self.source_bases)

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * len(self.sources) * len(self.source_bases)

    def rows(self, first: int, end: int) -> "AddressCopies":
        """Return a range of rows of every place, without copying the offsets."""
        if first == 0 and end >= len(self.sources):
            return self
        return self._replace(sources=self.sources[first:end], targets=self.targets[first:end])


class Timing(Enum):
    OFF = "off"
    ON = "on"
    """Jobs on a device measure how long the device took, for benchmarks."""


class CopyJob(Protocol):
    """Copies that were submitted together."""

    def is_done(self) -> bool:
        """Whether every byte has been copied. Never waits. TransportError if the device has
        failed.
        """


class AddressCopier(Protocol):
    """Copies segments between addresses of this process, perhaps asynchronously."""

    def start(self, copies: Sequence[AddressCopies]) -> CopyJob:
        """Start to copy. Targets must not overlap each other or any source. TransportError if an
        offset is larger than its bound; then no copy of this call is active.
        """

    def pause(self, seconds: float) -> None:
        """Wait for at most `seconds`, or until a job may have progressed. Releases the GIL."""

    def close(self) -> None:
        """Wait until no copy is active, then free all resources. Idempotent."""


class _Done:
    def is_done(self) -> bool:
        return True


class HostAddressCopier:
    """Copies host memory before `start` returns, so the caller keeps each call small."""

    def __init__(self) -> None:
        self._copy = fastest_copier()

    def start(self, copies: Sequence[AddressCopies]) -> CopyJob:
        for part in copies:
            if not are_within(part.sources, part.source_last) or not are_within(
                part.targets, part.target_last
            ):
                raise TransportError("a segment of this transfer leaves its region")
            if not part.num_rows or not part.size_bytes:
                continue
            first_source, source_bytes = _range_of(part.sources, part.size_bytes)
            first_target, target_bytes = _range_of(part.targets, part.size_bytes)
            descriptors = Descriptors(
                part.sources - first_source,
                part.targets - first_target,
                np.full(part.num_rows, part.size_bytes, np.int64),
            )
            for source_base, target_base in zip(part.source_bases, part.target_bases, strict=True):
                source = bytes_at(source_base + first_source, source_bytes)
                target = bytes_at(target_base + first_target, target_bytes)
                self._copy(target, source, descriptors)
        return _Done()

    def pause(self, seconds: float) -> None:
        short_sleep(seconds)

    def close(self) -> None:
        return None


def _range_of(offsets: Offsets, size_bytes: int) -> tuple[int, int]:
    """Return where the memory from the first to the last segment starts, and its size. The gaps
    between segments are not touched.
    """
    first = int(offsets.min())
    return first, int(offsets.max()) + size_bytes - first
