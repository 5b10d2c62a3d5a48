"""A data plane that does wrong on purpose, over any other: for tests and negative controls.

Owned by the thread of the plane it wraps. A comparison that a corrupted transfer does not fail proves nothing.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvferry.errors import ConfigError
from kvferry.planes import cuda_driver
from kvferry.planes.runs import Bytes
from kvferry.ports.data import Completion, DataPlane, Handle, Pieces, PlaneOffer
from kvferry.types import MemoryKind, PeerId, Region

__all__ = ["Faults", "FaultyDataPlane", "parse_faults"]

KNOWN = {("corrupt", "every"): "corrupt_every", ("fail", "every"): "fail_every", ("delay", "polls"): "delay_polls"}


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong. 0: never."""

    corrupt_every: int = 0
    """Every n-th read arrives with its first block of each region wrong; what peers wrote into lent blocks, with the first of those."""
    fail_every: int = 0
    """Every n-th transfer fails after it has moved."""
    delay_polls: int = 0
    """A completion is told this many polls late."""


def parse_faults(text: str) -> Faults:
    """`corrupt:every=1`, `fail:every=3`, `delay:polls=5`, or several joined by `;`. Empty: none. ConfigError for anything else."""
    faults = Faults()
    for part in filter(None, (each.strip() for each in text.split(";"))):
        kind, _, setting = part.partition(":")
        key, _, number = setting.partition("=")
        if (kind, key) not in KNOWN or not number.isdecimal() or int(number) < 1:
            known = ", ".join(f"{each}:{name}=N" for each, name in KNOWN)
            raise ConfigError(f"fault {part!r} is not known; use one or more of {known}, joined by ';', with N of at least 1")
        faults = replace(faults, **{KNOWN[kind, key]: int(number)})
    return faults


class FaultyDataPlane:
    """Implements `ports.data.DataPlane`: all calls go to `inner`, completions come back worse."""

    def __init__(self, inner: DataPlane, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._regions: tuple[Region, ...] = ()
        self._reads: dict[Handle, tuple[Pieces, ...]] = {}
        self._lent: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._fences: dict[Handle, int] = {}
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

    def offer(self) -> PlaneOffer:
        return self._inner.offer()

    def connect(self, peer: PeerId, offer: PlaneOffer, regions: Sequence[Region]) -> None:
        self._inner.connect(peer, offer, regions)

    def disconnect(self, peer: PeerId) -> None:
        self._inner.disconnect(peer)

    def read(self, peer: PeerId, pieces: Sequence[Pieces]) -> Handle:
        handle = self._inner.read(peer, pieces)
        self._reads[handle] = tuple(pieces)
        return handle

    def write(self, peer: PeerId, pieces: Sequence[Pieces], number: int = 0) -> Handle:
        return self._inner.write(peer, pieces, number)

    @property
    def fences_writes(self) -> bool:
        return self._inner.fences_writes

    def lend(self, number: int, blocks: Sequence[Sequence[int]]) -> None:
        self._inner.lend(number, blocks)
        self._lent[number] = tuple(map(tuple, blocks))

    def take_back(self, number: int) -> Handle:
        handle = self._inner.take_back(number)
        self._fences[handle] = number
        return handle

    def poll(self) -> list[Completion]:
        self._polls += 1
        self._late += [(self._polls + self._faults.delay_polls, self._spoilt(completion)) for completion in self._inner.poll()]
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
        self._lent.clear()
        self._fences.clear()
        self._late.clear()
        self._inner.close()

    def _spoilt(self, completion: Completion) -> Completion:
        if completion.handle in self._fences:  # no transfer of ours: it never fails
            self._spoil_lent(self._lent.pop(self._fences.pop(completion.handle), ()))
            return completion
        self._ended += 1
        pieces = self._reads.pop(completion.handle, None)
        if not completion.ok:
            return completion
        if pieces is not None and self._is_corruption_due():
            for part in pieces:
                count = max(1, self._regions[part.local_region].block_bytes // part.piece_bytes)
                for offset in part.local_offsets[:count].tolist():
                    self._corrupt(part.local_region, offset, part.piece_bytes)
        if self._is_due(self._ended - 1, self._faults.fail_every):
            return replace(completion, error="a fault was asked for")
        return completion

    def _spoil_lent(self, blocks: Sequence[Sequence[int]]) -> None:
        """Whatever peers have written into these is ours from now on."""
        if blocks and self._is_corruption_due():
            for index, region in enumerate(self._regions):
                if region.group < len(blocks) and blocks[region.group]:
                    self._corrupt(index, blocks[region.group][0] * region.stride_bytes, region.block_bytes)

    def _is_corruption_due(self) -> bool:
        self._ended_reads += 1
        return self._is_due(self._ended_reads - 1, self._faults.corrupt_every)

    @staticmethod
    def _is_due(before: int, every: int) -> bool:
        return every > 0 and (before + 1) % every == 0

    def _corrupt(self, region: int, offset: int, size_bytes: int) -> None:
        """The right bytes in the wrong places: wrong for certain, and still numbers that a model can compute with.

        Not moved by whole tokens: attention does not see in which order the tokens of one head lie."""
        address = self._regions[region].address + offset
        if self._regions[region].memory is MemoryKind.DRAM:
            piece = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
            piece[:] = _wrong(piece)
        else:
            cuda_driver.write_memory(address, _wrong(np.frombuffer(cuda_driver.read_memory(address, size_bytes), np.uint8)).tobytes())


def _wrong(piece: Bytes) -> Bytes:
    moved = np.roll(piece, len(piece) // 2 + 8)
    return moved if not np.array_equal(moved, piece) else piece ^ np.uint8(1)
