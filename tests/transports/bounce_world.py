"""Both sides of bounce-buffer transfers in one process. The test controls the clock, the delivery
of messages and the movement of bytes; there is no NIXL, no thread and no real time.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.transports.base import Completion, Handle, Operation, Segments
from kvferry.transports.copy.gather import AddressCopier, HostAddressCopier
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.nixl.agent import NixlLink
from kvferry.transports.nixl.bounce.initiator import BounceTransfers
from kvferry.transports.nixl.bounce.messages import BounceMessage, ToOwner
from kvferry.transports.nixl.bounce.owner import SlotServer
from kvferry.transports.nixl.bounce.slots import BounceBuffer, SlotTable
from kvferry.types import EngineId, Epoch, PeerId, Region

Bytes = npt.NDArray[np.uint8]
RECLAIM_S = 60.0
PAGE = 4096


@dataclass(slots=True)
class _Posted:
    handle: Handle
    operation: str
    descriptors: Descriptors


@dataclass(slots=True)
class DescriptorMover:
    """Moves the posted descriptors when `land` is called, or never."""

    posted: list[_Posted] = field(default_factory=list)
    last: int = 1000
    is_broken: bool = False
    metadata: list[bytes] = field(default_factory=list)
    """The metadata of the peers that was loaded."""
    direct: list[Handle] = field(default_factory=list)
    """The transfers that were started without bounce buffers."""

    def start(
        self, peer: PeerId, segments: Sequence[Segments], operation: Operation, handle: Handle
    ) -> Handle:
        self.direct.append(handle)
        return handle

    def update_metadata(self, peer: PeerId, metadata: bytes) -> None:
        self.metadata.append(metadata)

    def move(self, peer: PeerId, operation: str, descriptors: Descriptors) -> Handle:
        self.last += 1
        self.posted.append(_Posted(Handle(self.last), operation, descriptors))
        return Handle(self.last)

    def cancel(self, handle: Handle) -> None:
        return None  # posted transfers are waited for, not cancelled

    def land(self) -> list[Completion]:
        landed, self.posted = self.posted, []
        for each in landed:
            sides = each.descriptors.local, each.descriptors.remote, each.descriptors.size_bytes
            for here, there, size in zip(*(side.tolist() for side in sides), strict=True):
                to, source = (here, there) if each.operation == "READ" else (there, here)
                ctypes.memmove(to, source, size)
        return [
            Completion(
                each.handle, None, each.descriptors.total_bytes, len(each.descriptors), 0.0, 0.0
            )
            for each in landed
        ]


class Party:
    """The state of one transport, without the transport itself."""

    def __init__(
        self, name: str, sizes: Sequence[int], buffer_pages: int, chunk_bytes: int, seed: int
    ) -> None:
        self.name = name
        self.peer = PeerId(EngineId(name), Epoch("1"), 0)
        self.memories = [
            np.random.default_rng((seed, n)).integers(0, 256, size, dtype=np.uint8)
            for n, size in enumerate(sizes)
        ]
        self.regions = [
            Region(f"r{n}", each.ctypes.data, len(each), len(each), 1)
            for n, each in enumerate(self.memories)
        ]
        self.bounce_buffer = np.zeros(2 * buffer_pages * PAGE, np.uint8)
        copier: AddressCopier = HostAddressCopier()
        bounce_buffer = BounceBuffer(
            self.bounce_buffer.ctypes.data,
            len(self.bounce_buffer),
            copier,
            chunk_bytes,
            chunk_bytes,
        )
        self.own, self.served_slots = SlotTable.shared_pair(len(self.bounce_buffer))
        self.mover = DescriptorMover()
        self.transfers = BounceTransfers(
            bounce_buffer, self.own, self.mover, b"metadata", RECLAIM_S
        )
        self.slot_server = SlotServer(
            bounce_buffer, self.served_slots, self.regions, b"with the buffer", RECLAIM_S
        )
        self.ended: dict[Handle, str | None] = {}
        self.fallbacks = self.mover.direct
        self.last = 0

    def start(self, other: "Party", segments: Sequence[Segments], *, is_read: bool) -> Handle:
        self.last += 1
        operation = Operation.READ if is_read else Operation.WRITE
        link = NixlLink(other.peer, tuple(other.regions), other.name, b"")
        self.transfers.start(Handle(self.last), link, operation, segments, self.regions)
        return Handle(self.last)

    @property
    def is_quiet(self) -> bool:
        """True if no slot is taken, and no transfer is running or being served."""
        return (
            self.own.is_free
            and self.served_slots.is_free
            and not len(self.transfers)
            and not self.slot_server.is_serving
        )


@dataclass(slots=True)
class World:
    parties: dict[str, Party]
    now: float = 1000.0
    mail: list[tuple[str, str, BounceMessage]] = field(default_factory=list)
    """(sender, receiver, message) in the order of sending."""

    @classmethod
    def of(cls, *parties: Party) -> "World":
        return cls({party.name: party for party in parties})

    def turn(self, *names: str) -> None:
        """Run one tick of each named party, or of all parties if no name is given."""
        for name in names or self.parties:
            party = self.parties[name]
            for completion in party.mover.land() if not party.mover.is_broken else ():
                assert party.transfers.settle(completion, self.now)
            party.transfers.advance(self.now)
            party.slot_server.advance(self.now)
            for outgoing in (party.transfers.outgoing, party.slot_server.outgoing):
                self.mail += [
                    (name, receiver, message)
                    for receiver, messages in outgoing.drain()
                    for message in messages
                ]
            self.mail += [(name, receiver, part) for receiver, part in party.transfers.parts()]
            for completion in party.transfers.take_ended():
                assert completion.handle not in party.ended
                party.ended[completion.handle] = completion.error

    def deliver(self) -> None:
        mail, self.mail = self.mail, []
        for sender, receiver, message in mail:
            self.hand_over(sender, receiver, message)

    def hand_over(self, sender: str, receiver: str, message: Any) -> None:
        party = self.parties[receiver]
        if isinstance(message, ToOwner):
            party.slot_server.receive(sender, message, self.now)
        else:
            party.transfers.receive(sender, message, self.now)

    def run(self, turns: int = 2000) -> None:
        """Run until no party has anything to do."""
        for _ in range(turns):
            self.turn()
            if not self.mail and not any(
                party.transfers.can_move or party.slot_server.can_move
                for party in self.parties.values()
            ):
                return
            self.deliver()
        raise AssertionError("it does not come to an end")

    def wait(self, seconds: float, step_s: float = 0.5) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += step_s
            self.turn()
            self.deliver()


def scattered(
    local_region: int, remote_region: int, segment_bytes: int, slots: int, count: int, seed: int
) -> Segments:
    random = np.random.default_rng(seed)
    local, remote = (
        random.permutation(slots)[:count].astype(np.int64) * segment_bytes for _ in range(2)
    )
    return Segments(local_region, remote_region, segment_bytes, local, remote)
