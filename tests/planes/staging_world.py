"""Two sides of staged transfers in one process, with a clock, a mail and a wire that do what a test says. No NIXL, no thread, no time."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.planes.address_copy import AddressCopier, HostAddressCopier
from kvferry.planes.runs import Runs
from kvferry.planes.staging_lane import StagingPace, StagingRing
from kvferry.planes.staging_lender import ToOwner, WindowLender
from kvferry.planes.staging_ring import WindowTable
from kvferry.planes.staging_transfers import RingOf, StagedTransfers
from kvferry.planes.staging_wire import Message
from kvferry.ports.data import Completion, Handle, Pieces
from kvferry.types import EngineId, Epoch, PeerId, Region

__all__ = ["RECLAIM_S", "Party", "World", "scattered"]

Bytes = npt.NDArray[np.uint8]
RECLAIM_S = 60.0
PAGE = 4096


@dataclass(slots=True)
class _Posted:
    handle: Handle
    operation: str
    runs: Runs


@dataclass(slots=True)
class Wire:
    """Moves what was posted when it is told to, or never."""

    posted: list[_Posted] = field(default_factory=list)
    last: int = 1000
    is_broken: bool = False

    def move(self, peer: PeerId, operation: str, runs: Runs) -> Handle:
        self.last += 1
        self.posted.append(_Posted(Handle(self.last), operation, runs))
        return Handle(self.last)

    def cancel(self, handle: Handle) -> None:
        return None  # what is posted is waited for

    def land(self) -> list[Completion]:
        landed, self.posted = self.posted, []
        for each in landed:
            for here, there, size in zip(
                *(part.tolist() for part in (each.runs.local, each.runs.remote, each.runs.size_bytes)), strict=True
            ):
                ctypes.memmove(*((here, there) if each.operation == "READ" else (there, here)), size)
        return [Completion(each.handle, None, each.runs.total_bytes, len(each.runs), 0.0, 0.0) for each in landed]


class Party:
    """One plane's state, without the plane."""

    def __init__(self, name: str, sizes: Sequence[int], ring_pages: int, chunk_bytes: int, seed: int) -> None:
        self.name = name
        self.peer = PeerId(EngineId(name), Epoch("1"), 0)
        self.memories = [np.random.default_rng((seed, n)).integers(0, 256, size, dtype=np.uint8) for n, size in enumerate(sizes)]
        self.regions = [Region(f"r{n}", each.ctypes.data, len(each), len(each), 1) for n, each in enumerate(self.memories)]
        self.ring = np.zeros(2 * ring_pages * PAGE, np.uint8)
        copier: AddressCopier = HostAddressCopier()
        ring = StagingRing(self.ring.ctypes.data, len(self.ring), copier, StagingPace(chunk_bytes, chunk_bytes))
        self.own, self.lent = WindowTable.two_of(len(self.ring))
        self.wire = Wire()
        self.transfers = StagedTransfers(ring, self.own, self.wire, b"metadata", RECLAIM_S)
        self.lender = WindowLender(ring, self.lent, self.regions, RECLAIM_S)
        self.ended: dict[Handle, str | None] = {}
        self.unstaged: list[Handle] = []
        self.last = 0

    def start(self, other: "Party", pieces: Sequence[Pieces], *, is_read: bool) -> Handle:
        self.last += 1
        ring = RingOf(other.name, other.ring.ctypes.data, len(other.ring))
        self.transfers.start(Handle(self.last), other.peer, ring, pieces, self.regions, is_read=is_read)
        return Handle(self.last)

    @property
    def is_quiet(self) -> bool:
        """Nothing is kept of anything."""
        return self.own.is_free and self.lent.is_free and not len(self.transfers) and not self.lender.is_serving


@dataclass(slots=True)
class World:
    parties: dict[str, Party]
    now: float = 1000.0
    mail: list[tuple[str, str, Message]] = field(default_factory=list)
    """Sender, receiver, message: in the order in which they were sent."""

    @classmethod
    def of(cls, *parties: Party) -> "World":
        return cls({party.name: party for party in parties})

    def turn(self, *names: str) -> None:
        """One turn of each (of all, if none is named)."""
        for name in names or self.parties:
            party = self.parties[name]
            for completion in party.wire.land() if not party.wire.is_broken else ():
                assert party.transfers.settle(completion, self.now)
            party.transfers.advance(self.now)
            party.lender.advance(self.now)
            for receiver, messages in (*party.transfers.take_mail(), *party.lender.take_mail()):
                self.mail += [(name, receiver, message) for message in messages]
            for completion in party.transfers.take_ended():
                assert completion.handle not in party.ended
                party.ended[completion.handle] = completion.error
            party.unstaged += [handle for handle, *_ in party.transfers.take_unstaged()]

    def deliver(self) -> None:
        mail, self.mail = self.mail, []
        for sender, receiver, message in mail:
            self.hand_over(sender, receiver, message)

    def hand_over(self, sender: str, receiver: str, message: Any) -> None:
        party = self.parties[receiver]
        if isinstance(message, ToOwner):
            party.lender.receive(sender, message, self.now)
        else:
            party.transfers.receive(sender, message, self.now)

    def run(self, turns: int = 2000) -> None:
        """Until nobody has anything to do."""
        for _ in range(turns):
            self.turn()
            if not self.mail and not any(party.transfers.can_move or party.lender.can_move for party in self.parties.values()):
                return
            self.deliver()
        raise AssertionError("it does not come to an end")

    def wait(self, seconds: float, step_s: float = 0.5) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += step_s
            self.turn()
            self.deliver()


def scattered(local_region: int, remote_region: int, piece_bytes: int, slots: int, count: int, seed: int) -> Pieces:
    random = np.random.default_rng(seed)
    local, remote = (random.permutation(slots)[:count].astype(np.int64) * piece_bytes for _ in range(2))
    return Pieces(local_region, remote_region, piece_bytes, local, remote)
