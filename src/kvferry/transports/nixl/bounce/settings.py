"""When transfers go through bounce buffers, and how much memory the buffers take. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvferry.transports.base import Segments
from kvferry.transports.copy.segments import group_by_offsets
from kvferry.transports.nixl.bounce.messages import MAX_SEGMENTS
from kvferry.types import MemoryKind

MIB = 1024 * 1024
BUFFER_SHARE = 100
"""A bounce buffer of default size takes at most one hundredth of the device's memory."""
MIN_BUFFER_BYTES = 64 * 1024
"""A smaller bounce buffer hardly has room for one slot of each side, so bounce buffers are off."""
MIN_DESCRIPTORS = 64
"""Transfers with fewer descriptors go directly.

The two sides of a bounce-buffer transfer first exchange some messages; NIXL moves this many
descriptors meanwhile.
"""
SAMPLED_SEGMENTS, SAMPLED_PLANS = 256, 4
"""Limits of the sample in `is_fragmented`.

Regions mostly move the same blocks, and are then one plan.
"""


class ResolvedBounceSettings(NamedTuple):
    """The settings in effect, with the defaults filled in."""

    segment_bytes: int
    buffer_bytes: int
    chunk_bytes: int
    min_descriptors: int = MIN_DESCRIPTORS

    @property
    def is_on(self) -> bool:
        return self.segment_bytes > 0 and self.buffer_bytes >= MIN_BUFFER_BYTES


DEFAULTS = {
    MemoryKind.VRAM: ResolvedBounceSettings(256 * 1024, 1024 * MIB, 64 * MIB),
    MemoryKind.DRAM: ResolvedBounceSettings(0, 64 * MIB, 4 * MIB),
}
"""docs/decisions/037-bounce-buffers.md has the measurements."""


@dataclass(frozen=True, slots=True)
class BounceSettings:
    """Settings of the user. None means the default for the kind of memory."""

    segment_bytes: int | None = None
    """Transfers whose segments are shorter on average use bounce buffers; 0 turns bounce buffers
    off.
    """
    buffer_bytes: int | None = None
    """Size of the bounce buffer, allocated when the first transfer needs it; 0 turns bounce buffers
    off.

    A quarter is reserved for our own transfers and a quarter for slots granted to peers; both may
    use the half between.
    """
    chunk_bytes: int | None = None
    min_descriptors: int | None = None
    """Transfers with fewer descriptors go directly, whatever their size."""

    def resolved(self, kind: MemoryKind, device_bytes: int | None = None) -> ResolvedBounceSettings:
        defaults = DEFAULTS[kind]
        if device_bytes is not None:
            share = device_bytes // BUFFER_SHARE // MIB * MIB
            defaults = defaults._replace(buffer_bytes=min(defaults.buffer_bytes, share))
        wanted = (self.segment_bytes, self.buffer_bytes, self.chunk_bytes, self.min_descriptors)
        pairs = zip(wanted, defaults, strict=True)
        return ResolvedBounceSettings(*(own if own is not None else given for own, given in pairs))


def is_fragmented(segments: Sequence[Segments], settings: ResolvedBounceSettings) -> bool:
    """Whether NIXL would need many small descriptors for these segments.

    An estimate from the first segments of the largest plans: a look at all segments takes as long
    as the transfer.
    """
    num_segments = sum(len(part.local_offsets) for part in segments)
    if not settings.min_descriptors <= num_segments <= MAX_SEGMENTS:
        return False
    seen_bytes = seen_descriptors = 0
    for same in sorted(
        group_by_offsets(segments), key=lambda same: -len(same) * same[0].total_bytes
    )[:SAMPLED_PLANS]:
        size = same[0].segment_bytes
        local = same[0].local_offsets[:SAMPLED_SEGMENTS]
        remote = same[0].remote_offsets[:SAMPLED_SEGMENTS]
        # A segment that adjoins the previous one on both sides shares its descriptor.
        steps = np.diff(local)
        joined = (steps == np.diff(remote)) & (np.abs(steps) == size)
        seen_descriptors += len(same) * (len(local) - int(np.count_nonzero(joined)))
        seen_bytes += len(same) * len(local) * size
    share = seen_bytes / sum(part.total_bytes for part in segments)
    return (
        seen_descriptors / share >= settings.min_descriptors
        and seen_bytes < seen_descriptors * settings.segment_bytes
    )
