"""This process's memory, by region or by address."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
)
from kvferry.types import Region

__all__ = [
    "MAX_OFFSET",
    "SLICE_BYTES",
    "SLICE_COST",
    "AddressCopier",
    "AddressCopies",
    "AddressedMemory",
    "Copier",
    "CopyDirection",
    "CopyJob",
    "HostAddressCopier",
    "RegionCopy",
    "Timing",
    "copy_by_numpy",
    "copy_in_slices",
    "fastest_copier",
    "region_view",
]


class AddressedMemory:
    """A stretch of this process's memory, by address. Whoever asks has checked that a range may be
    touched: there may be gaps.
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


def region_view(region: Region) -> Bytes:
    """The bytes from the region's first block to its last. Valid as long as the memory is; nobody
    checks that.
    """
    if region.size_bytes <= 0:
        raise LocalProtocolError(f"region {region.name!r} is empty")
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.size_bytes).from_address(region.address))


# -------------------- copiers -------------------- How a batch of runs is copied: by the native
# function, or by numpy where kvferry was installed without a compiler.
#
# Called by the thread that owns the transport. Both release the GIL while they copy. Why there is a
# native function, and what it gains: docs/decisions/018-copies-by-a-compiled-loop.md.


CopySegments = Callable[[Bytes, Bytes, Offsets, Offsets, Offsets], None]


class Copier(Protocol):
    def __call__(self, target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
        """Copy each run from its `local` place in the source to its `remote` place in the target.
        All lie within: checked before.
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


# -------------------- gather --------------------
# Copying segments between two mapped regions, in slices, at the speed of memory.
#
# Called by the thread that owns the transport. Neighbours on both sides are joined first. What is
# left is copied in the order of its source: a processor reads ahead well only where addresses
# ascend; where the bytes are written hardly matters. `kvferry bench transfer` shows what comes of
# it, beside memcpy.


SLICE_BYTES = 16 * 1024 * 1024
"""What one slice copies at most: about a millisecond, so that no message waits for a transfer. Each
empties the caches, so that whatever the interpreter does between two slices is slow; there should
be few.
"""

SLICE_COST = 128 * 1024
"""What a slice takes besides its bytes, in bytes that could have been copied meanwhile: some calls
of the interpreter.
"""


class CopyDirection(Enum):
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True, eq=False)
class RegionCopy:
    """One region's share of a transfer. The segments have been checked against both regions."""

    segments: Segments
    local: Bytes
    remote: Bytes
    direction: CopyDirection

    def ends(self) -> tuple[Bytes, Bytes]:
        """Target and source."""
        return (
            (self.local, self.remote)
            if self.direction is CopyDirection.READ
            else (self.remote, self.local)
        )

    def cut(self) -> list[tuple[Descriptors, int]]:
        """Slices and their bytes: joined, with the source as their local side, and sorted by it."""
        segments = self.segments
        if self.direction is CopyDirection.READ:
            segments = Segments(
                segments.remote_region,
                segments.local_region,
                segments.segment_bytes,
                segments.remote_offsets,
                segments.local_offsets,
            )
        descriptors = coalesce(segments)
        return [
            (part, part.total_bytes)
            for part in batches(descriptors, SLICE_BYTES, max(1, len(descriptors)))
        ]

    def is_cut_as(self, other: "RegionCopy") -> bool:
        """Whether the same places are copied, in another region."""
        ours, theirs = self.segments, other.segments
        return (
            (self.direction, ours.segment_bytes) == (other.direction, theirs.segment_bytes)
            and _are_same(ours.local_offsets, theirs.local_offsets)
            and _are_same(ours.remote_offsets, theirs.remote_offsets)
        )


def copy_in_slices(copies: Iterable[RegionCopy], copier: Copier) -> Iterator[tuple[int, int]]:
    """Copy one slice each time; yields its bytes and how many copies it took. Layers mostly move
    the same blocks: these are cut once.
    """
    last: RegionCopy | None = None
    parts: list[tuple[Descriptors, int]] = []
    for copy in copies:
        if last is None or not copy.is_cut_as(last):
            parts, last = copy.cut(), copy
        target, source = copy.ends()
        for descriptors, total_bytes in parts:
            copier(target, source, descriptors)
            yield total_bytes, len(descriptors)


def _are_same(first: Offsets, second: Offsets) -> bool:
    return first is second or np.array_equal(first, second)


# -------------------- address copy -------------------- Copies between addresses of this process:
# many segments of one size from anywhere to anywhere, handed over as a whole.
#
# The layers of a cache mostly move the same blocks, so the same offsets may stand for several
# places.
#
# What moves KV without a peer's help stands on this: the gathering and scattering of bounce-buffer
# transfers, and the transport that reads a peer's memory on the same GPU. Called by one thread.


MAX_OFFSET = (1 << 63) - 1


class AddressCopies(NamedTuple):
    """For every place `p`, copy `i` moves `size_bytes` bytes from address `source_bases[p] +
    sources[i]` to `target_bases[p] + targets[i]`, valid in this process for all offsets from 0 to
    `source_last` and `target_last`.
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
        """Segments of each place."""
        return len(self.sources)

    @property
    def num_places(self) -> int:
        return len(self.source_bases)

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * len(self.sources) * len(self.source_bases)

    def rows(self, first: int, end: int) -> "AddressCopies":
        """Some of every place's, or all, without copying anything."""
        if first == 0 and end >= len(self.sources):
            return self
        return self._replace(sources=self.sources[first:end], targets=self.targets[first:end])


class Timing(Enum):
    OFF = "off"
    ON = "on"
    """Jobs on a device tell how long it was at them; for benchmarks."""


class CopyJob(Protocol):
    def is_done(self) -> bool:
        """Whether every byte is in place. Never waits. TransportError when the device has
        failed.
        """


class AddressCopier(Protocol):
    def start(self, copies: Sequence[AddressCopies]) -> CopyJob:
        """Begin to copy. Targets do not overlap each other, nor any source. TransportError when an
        offset is past its last; then nothing of this call is under way.
        """

    def pause(self, seconds: float) -> None:
        """So long at most, until something more of it may be done. Other threads of the interpreter
        go on meanwhile.
        """

    def close(self) -> None:
        """Wait until nothing of it is under way, and let go of what it holds. Idempotent."""


class _Done:
    def is_done(self) -> bool:
        return True


class HostAddressCopier:
    """Copies host memory at once: the caller keeps each call small."""

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
            sources, targets = (
                _HostRange.over(part.sources, part.size_bytes),
                _HostRange.over(part.targets, part.size_bytes),
            )
            descriptors = Descriptors(
                part.sources - sources.first,
                part.targets - targets.first,
                np.full(part.num_rows, part.size_bytes, np.int64),
            )
            for source_base, target_base in zip(part.source_bases, part.target_bases, strict=True):
                self._copy(targets.at(target_base), sources.at(source_base), descriptors)
        return _Done()

    def pause(self, seconds: float) -> None:
        short_sleep(seconds)

    def close(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _HostRange:
    """All memory from the first to the last of some offsets. There may be gaps: nobody touches
    those.
    """

    first: int
    length: int

    @classmethod
    def over(cls, offsets: Offsets, size_bytes: int) -> "_HostRange":
        first = int(offsets.min())
        return cls(first, int(offsets.max()) + size_bytes - first)

    def at(self, base: int) -> Bytes:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.length).from_address(base + self.first))
