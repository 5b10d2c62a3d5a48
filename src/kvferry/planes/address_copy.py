"""Copies between addresses of this process: many segments of one size from anywhere to anywhere, handed over as a whole.

The layers of a cache mostly move the same blocks, so the same offsets may stand for several places.

What moves KV without a peer's help stands on this: the gathering and scattering of bounce-buffer transfers, and the transport that reads a
peer's memory on the same GPU. Called by one thread.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from kvferry.breath import short_sleep
from kvferry.errors import TransportError
from kvferry.planes.copiers import fastest_copier
from kvferry.planes.offsets import are_within
from kvferry.planes.runs import Bytes, Descriptors, Offsets

__all__ = ["MAX_OFFSET", "AddressCopier", "AddressCopies", "CopyJob", "HostAddressCopier", "Timing"]

MAX_OFFSET = (1 << 63) - 1


class AddressCopies(NamedTuple):
    """For every place `p`, copy `i` moves `size_bytes` bytes from address `source_bases[p] + sources[i]` to `target_bases[p] + targets[i]`,
    valid in this process for all offsets from 0 to `source_last` and `target_last`."""

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
        """Whether every byte is in place. Never waits. TransportError when the device has failed."""


class AddressCopier(Protocol):
    def start(self, copies: Sequence[AddressCopies]) -> CopyJob:
        """Begin to copy. Targets do not overlap each other, nor any source. TransportError when an offset is past its last; then
        nothing of this call is under way."""

    def pause(self, seconds: float) -> None:
        """So long at most, until something more of it may be done. Other threads of the interpreter go on meanwhile."""

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
            if not are_within(part.sources, part.source_last) or not are_within(part.targets, part.target_last):
                raise TransportError("a segment of this transfer leaves its region")
            if not part.num_rows or not part.size_bytes:
                continue
            sources, targets = _HostRange.over(part.sources, part.size_bytes), _HostRange.over(part.targets, part.size_bytes)
            descriptors = Descriptors(
                part.sources - sources.first, part.targets - targets.first, np.full(part.num_rows, part.size_bytes, np.int64)
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
    """All memory from the first to the last of some offsets. There may be gaps: nobody touches those."""

    first: int
    length: int

    @classmethod
    def over(cls, offsets: Offsets, size_bytes: int) -> "_HostRange":
        first = int(offsets.min())
        return cls(first, int(offsets.max()) + size_bytes - first)

    def at(self, base: int) -> Bytes:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.length).from_address(base + self.first))
