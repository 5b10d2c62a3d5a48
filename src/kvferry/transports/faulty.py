"""A data transport that injects faults into any other transport: for tests and negative controls.

A test that compares outputs proves nothing unless a corrupted transfer makes it fail. The thread
that owns the wrapped transport makes all calls.
"""

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvferry.errors import ConfigError
from kvferry.transports.base import Completion, DataTransport, Handle, Segments, TransportOffer
from kvferry.transports.copy.segments import Bytes
from kvferry.transports.cuda_ipc import driver as cuda_driver
from kvferry.types import MemoryKind, PeerId, Region

COUNTS = ("corrupt:every", "fail:every", "delay:polls")
"""The faults with a number that `parse_faults` accepts."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Which faults to inject, and how often. 0 means never."""

    corrupt_every: int = 0
    """Corrupt the first block of each region in every n-th read that ends. A revoked write grant
    counts as a read: the first granted block of each region is corrupted.
    """
    corrupt_regions: str = ""
    """Corrupt only regions whose name contains this text."""
    fail_every: int = 0
    """Fail every n-th transfer after its bytes have moved."""
    delay_polls: int = 0
    """Return each completion this many polls late."""


def parse_faults(text: str) -> Faults:
    """Parse `corrupt:every=1`, `fail:every=3`, `delay:polls=5`, or several joined by `;`. With
    `corrupt:regions=TEXT` only regions whose name contains the text are corrupted. Empty means no
    faults. ConfigError for anything else.
    """
    faults = Faults()
    for part in filter(None, (each.strip() for each in text.split(";"))):
        name, _, value = part.partition("=")
        chosen: dict[str, Any]
        if name == "corrupt:regions" and value:
            chosen = {"corrupt_regions": value}
        elif name in COUNTS and re.fullmatch("[1-9][0-9]{0,8}", value):
            chosen = {name.replace(":", "_"): int(value)}
        else:
            known = ", ".join(f"{each}=N" for each in COUNTS)
            raise ConfigError(
                f"fault {part!r} is not known; use one or more of {known}, corrupt:regions=TEXT, "
                "joined by ';', with N of at least 1"
            )
        faults = replace(faults, **chosen)
    return faults


class FaultyTransport:
    """Implements `transports.base.DataTransport`: passes all calls to `inner`, and injects faults
    when `inner` reports completions.
    """

    def __init__(self, inner: DataTransport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._regions: tuple[Region, ...] = ()
        self._reads: dict[Handle, tuple[Segments, ...]] = {}
        self._granted: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._revocations: dict[Handle, int] = {}
        self._late: list[tuple[int, Completion]] = []
        self._polls = 0
        self._ended = 0
        self._ended_reads = 0

    @property
    def name(self) -> str:
        return self._inner.name

    def register(self, regions: Sequence[Region]) -> bool:
        self._regions = tuple(regions)
        return self._inner.register(regions)

    def offer(self) -> TransportOffer:
        return self._inner.offer()

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        self._inner.connect(peer, offer, regions)

    def disconnect(self, peer: PeerId) -> None:
        self._inner.disconnect(peer)

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        handle = self._inner.read(peer, segments)
        self._reads[handle] = tuple(segments)
        return handle

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        return self._inner.write(peer, segments, grant_id)

    @property
    def supports_write_grants(self) -> bool:
        return self._inner.supports_write_grants

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        self._inner.grant_writes(grant_id, blocks)
        self._granted[grant_id] = tuple(map(tuple, blocks))

    def revoke_writes(self, grant_id: int) -> Handle:
        handle = self._inner.revoke_writes(grant_id)
        self._revocations[handle] = grant_id
        return handle

    def poll(self) -> list[Completion]:
        self._polls += 1
        self._late += [
            (self._polls + self._faults.delay_polls, self._with_fault(completion))
            for completion in self._inner.poll()
        ]
        due = [completion for at, completion in self._late if at <= self._polls]
        self._late = [(at, completion) for at, completion in self._late if at > self._polls]
        return due

    def cancel(self, handle: Handle) -> None:
        self._inner.cancel(handle)

    def poll_interval_s(self) -> float | None:
        return 0.0 if self._late else self._inner.poll_interval_s()

    def serving_interval_s(self) -> float | None:
        return self._inner.serving_interval_s()

    def close(self) -> None:
        self._reads.clear()
        self._granted.clear()
        self._revocations.clear()
        self._late.clear()
        self._inner.close()

    def _with_fault(self, completion: Completion) -> Completion:
        if completion.handle in self._revocations:  # not a transfer: a revocation never fails
            self._corrupt_granted(self._granted.pop(self._revocations.pop(completion.handle), ()))
            return completion
        self._ended += 1
        segments = self._reads.pop(completion.handle, None)
        if not completion.ok:
            return completion
        if segments is not None and self._is_corruption_due():
            for part in segments:
                count = max(1, self._regions[part.local_region].block_bytes // part.segment_bytes)
                for offset in part.local_offsets[:count].tolist():
                    self._corrupt(part.local_region, offset, part.segment_bytes)
        if self._is_due(self._ended - 1, self._faults.fail_every):
            return replace(completion, error="injected fault")
        return completion

    def _corrupt_granted(self, blocks: Sequence[Sequence[int]]) -> None:
        """Corrupt granted blocks after the grant was revoked: the peer's bytes are complete now."""
        if blocks and self._is_corruption_due():
            for index, region in enumerate(self._regions):
                if region.group < len(blocks) and blocks[region.group]:
                    self._corrupt(
                        index, blocks[region.group][0] * region.stride_bytes, region.block_bytes
                    )

    def _is_corruption_due(self) -> bool:
        self._ended_reads += 1
        return self._is_due(self._ended_reads - 1, self._faults.corrupt_every)

    @staticmethod
    def _is_due(before: int, every: int) -> bool:
        return every > 0 and (before + 1) % every == 0

    def _corrupt(self, region: int, offset: int, size_bytes: int) -> None:
        """Move the bytes of a segment to wrong positions: certainly wrong, but still numbers that a
        model can compute with.

        The bytes are not moved by whole tokens: attention does not depend on the order of the
        tokens of one head.
        """
        if self._faults.corrupt_regions not in self._regions[region].name:
            return
        address = self._regions[region].address + offset
        if self._regions[region].memory is MemoryKind.DRAM:
            segment = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
            segment[:] = _corrupted(segment)
        else:
            cuda_driver.write_memory(
                address,
                _corrupted(
                    np.frombuffer(cuda_driver.read_memory(address, size_bytes), np.uint8)
                ).tobytes(),
            )


def _corrupted(segment: Bytes) -> Bytes:
    """Rotate the bytes; flip a bit of each byte if the rotation changes nothing."""
    moved = np.roll(segment, len(segment) // 2 + 8)
    return moved if not np.array_equal(moved, segment) else segment ^ np.uint8(1)
