"""The `nixl` data transport: wherever NIXL reaches (UCX by default). NIXL itself is behind
`nixl_agent`.

Owned by one thread. It has two agents. The *serving* one is what `offer` hands out: peers read and
write through it; it posts nothing and lives as long as the transport. Our own transfers are posted
on another, made for the first peer connected, which can be thrown away: only its end stops for
certain what is under way with a peer that has gone silent (`nixl_generations`). Facts, NIXL 1.5.1
with UCX 1.23:

- Posting may copy everything before it returns (CMA); so transfers are posted in bounded batches,
  at most one in each `poll`.
- NIXL's progress thread burns a core while idle, so it is off and `poll` makes progress. The side
  that reads always needs that. The side that is read needs it while a connection comes up, and on
  emulated transports (tcp) for every byte; see `serving_interval_s`.
- A peer that dies shows as an error of the next status call, within milliseconds on one host; one
  that is stopped or cut off, as silence.
- What a *write* has handed to the network arrives whatever becomes of its agent: only the peer can
  say when its memory is at rest.
"""

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from kvferry.errors import ConfigError, LocalProtocolError, TransportError
from kvferry.transports.base import Completion, Handle, Segments, TransportOffer
from kvferry.transports.copy.segments import (
    Descriptors,
    batches,
    check_regions,
    check_segments,
    descriptors_between,
)
from kvferry.transports.locality import nixl_locality
from kvferry.transports.nixl.agent import AgentPool, NixlAgent, load_nixl
from kvferry.transports.nixl.transfer import Agent, NixlLink, NixlTransfer
from kvferry.transports.write_grants import write_grants_unsupported
from kvferry.types import MemoryKind, PeerId, Region

__all__ = ["NetworkReach", "NixlTransport", "load_nixl"]

MAX_BATCH_BYTES = {MemoryKind.DRAM: 32 * 1024 * 1024, MemoryKind.VRAM: 1024 * 1024 * 1024}
"""Posting copies host memory on the way. Device memory is copied by the device, and then each post
costs more than many bytes.
"""
MAX_BATCH_DESCRIPTORS = 1000
"""Below 1,024, from where on NIXL divides a batch among threads of its own. They spin while
something is under way, on cores that the engine computes on, and have a connection each, so that an
error of one says nothing about the others.
"""
CANCEL_TIMEOUT_S = 5.0
"""How long a stopped transfer waits for its peer, counted from the peer's last sign of life. A peer
that answers ends it sooner, with its connection whole; a batch of 32 MiB in this time is a link of
54 Mbit/s.
"""
BUSY_S = 120e-6
"""Progress that took longer moved something: idle it takes 3 µs when called at once again, 60 µs
when caches have gone cold.
"""
BUSY_MEMORY_S = 0.02
BUSY_INTERVAL_S = 0.001
SERVING_INTERVAL_S = 0.01
QUIET_AFTER_S = 1.0
QUIET_SERVING_INTERVAL_S = 0.1
"""While peers may read, but nothing has moved for so long: a turn of the transfer worker takes 0.3
ms when caches have gone cold, and an idle process shall take less than 1 % of a core. The transfer
worker looks more often by itself when a read is likely to begin.
"""
DRAIN_TIMEOUT_S = 2.0
MAX_NOTES, MAX_NOTE_BYTES = 1024, 256 * 1024
"""Notifications that nobody has taken yet. What is beyond is dropped: anybody who can reach NIXL
can send some.
"""


class NetworkReach(Enum):
    """From where NIXL's transports may be reached."""

    ANYWHERE = "anywhere"
    THIS_HOST = "this host"


class _NixlOffer(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    metadata: bytes


class NixlTransport:
    """Implements `ports.data.DataTransport`. Nothing of NIXL is loaded before `register`."""

    def __init__(
        self,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 4,
        reach: NetworkReach = NetworkReach.ANYWHERE,
        cancel_timeout_s: float = CANCEL_TIMEOUT_S,
    ) -> None:
        self._backends = tuple(backends)
        self._reach = reach
        self._num_threads = num_threads
        self._serving: NixlAgent | None = None
        self._posting = AgentPool(cancel_timeout_s)
        self._regions: tuple[Region, ...] = ()
        self._links: dict[PeerId, NixlLink] = {}
        self._transfers: deque[NixlTransfer] = deque()
        self._last_handle = 0
        self._busy_until = 0.0
        self._known_until = 0.0
        self._notes: deque[bytes] | None = None

    @property
    def name(self) -> str:
        return "nixl"

    def register(self, regions: Sequence[Region]) -> bool:
        if len({(region.memory, region.device) for region in regions}) != 1:
            return False
        if self._reach is NetworkReach.THIS_HOST:
            # UCX listens on every interface, and trusts whoever knows its wire format.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self._serving = self._open_agent(regions, num_threads=0)  # it posts nothing
        self._regions = tuple(regions) if self._serving else ()
        return self._serving is not None

    def offer(self) -> TransportOffer:
        agent = self._registered()
        near = nixl_locality(self._backends, os.environ)
        return TransportOffer(
            self.name, "", msgspec.msgpack.encode(_NixlOffer(agent.name, agent.metadata())), near
        )

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        serving = self._registered()
        try:
            decoded = msgspec.msgpack.decode(offer.blob, type=_NixlOffer)
        except msgspec.MsgspecError as error:
            raise TransportError(
                f"the nixl offer of {peer} cannot be understood ({error}); do both sides run the "
                "same kvferry?"
            ) from error
        check_regions(regions, peer)
        if (
            decoded.agent == serving.name
            or len({(region.memory, region.device) for region in regions}) != 1
        ):
            raise TransportError(
                f"the nixl offer of {peer} names this very engine, or memory of several kinds; "
                "drop this peer"
            )
        self.disconnect(peer)
        link = NixlLink(peer, decoded.agent, decoded.metadata, tuple(regions))
        self._posting.reach(link, self._transfers, self._open_posting_agent)
        self._links[peer] = link

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._drop(link, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, "READ")

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        return self._start(peer, segments, "WRITE")

    @property
    def supports_write_grants(self) -> bool:
        return False

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        raise write_grants_unsupported(self.name)

    def revoke_writes(self, grant_id: int) -> Handle:
        raise write_grants_unsupported(self.name)

    def poll(self) -> list[Completion]:
        if self._serving is None:
            return []
        self._progress(self._serving)
        return self.poll_posted()

    def poll_posted(self) -> list[Completion]:
        """As `poll`, when `take_notes` has just been called."""
        if not self._links and not self._transfers and self._posting.is_settled:
            return []
        for agent in self._posting.connected():
            self._progress(agent)
        for transfer in self._transfers:
            self._check(transfer)
        posted = self._post_next()
        if posted is not None:
            # Between processes of one host a read is over when it has been posted.
            self._check(posted)
        self._posting.advance(self._transfers)
        if not any(transfer.has_ended for transfer in self._transfers):
            return []
        ended = [transfer for transfer in self._transfers if transfer.has_ended]
        self._transfers = deque(transfer for transfer in self._transfers if not transfer.has_ended)
        return [transfer.completion() for transfer in ended]

    def cancel(self, handle: Handle) -> None:
        for transfer in self._transfers:
            if transfer.handle == handle:
                transfer.stop("cancelled", time.monotonic())

    def poll_interval_s(self) -> float | None:
        if not self._transfers:
            return None if self._posting.is_settled else BUSY_INTERVAL_S
        can_move = self.can_post or any(transfer.has_ended for transfer in self._transfers)
        return 0.0 if can_move or self._is_busy() else BUSY_INTERVAL_S

    def serving_interval_s(self) -> float | None:
        if self._is_busy():
            return BUSY_INTERVAL_S
        return (
            SERVING_INTERVAL_S
            if time.monotonic() < self._busy_until + QUIET_AFTER_S
            else QUIET_SERVING_INTERVAL_S
        )

    # -- for transports that stand on this one --

    def move(self, peer: PeerId, operation: str, descriptors: Descriptors) -> Handle:
        """As `read` ("READ") or `write` ("WRITE"), of runs given by their addresses: joined
        already, and checked.
        """
        link = self._links.get(peer)
        if link is None:
            raise TransportError(f"peer {peer} is not connected over nixl")
        max_bytes = MAX_BATCH_BYTES[self._regions[0].memory]
        is_one = len(descriptors) <= MAX_BATCH_DESCRIPTORS and descriptors.total_bytes <= max_bytes
        return self._enqueue(
            link,
            operation,
            iter((descriptors,))
            if is_one
            else batches(descriptors, max_bytes, MAX_BATCH_DESCRIPTORS),
        )

    @property
    def can_post(self) -> bool:
        """Whether the next poll hands something more to NIXL."""
        return any(transfer.can_post for transfer in self._transfers)

    def identity(self) -> tuple[str, bytes]:
        """The serving agent, by its name and its metadata: whoever has connected to these can
        notify us.
        """
        agent = self._registered()
        return agent.name, agent.metadata()

    def connect_agent(
        self, peer: PeerId, name: str, metadata: bytes, regions: Sequence[Region]
    ) -> None:
        """As `connect`, with what `identity` tells there."""
        self.connect(
            peer,
            TransportOffer(self.name, "", msgspec.msgpack.encode(_NixlOffer(name, metadata))),
            regions,
        )

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self._links

    def notify(self, peer: PeerId, note: bytes) -> None:
        """Send a peer a few bytes. They arrive whole and in order, or the connection fails; whether
        they have arrived is not known. TransportError, and the peer is disconnected, when it is
        known to be gone.
        """
        link = self._links.get(peer)
        if link is None:
            raise TransportError(f"peer {peer} is not connected over nixl")
        try:
            self._posting.reach(link, self._transfers, self._open_posting_agent).notify(note, link)
        except TransportError as error:
            self._fail(link, str(error))
            raise

    def expect_calls(self, until: float) -> None:
        """Whoever stands on this transport calls all the time until then: nobody needs to find out
        whether something moves.
        """
        self._known_until = until

    def take_notes(self) -> list[bytes]:
        """What has been sent to us, by anybody. The first call says that they are wanted."""
        if self._notes is None:
            self._notes = deque(maxlen=MAX_NOTES)
        if self._serving is not None:
            self._progress(self._serving)
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def close(self) -> None:
        """Waits a bounded time for what is posted, then ends all agents, so that no byte is written
        afterwards.
        """
        if self._serving is None:
            return
        for peer in list(self._links):
            self.disconnect(peer)
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self._transfers and time.monotonic() < deadline:
            self.poll()
        self._posting.close(self._transfers)
        self._transfers.clear()
        self._serving.close()
        self._serving = None

    def _registered(self) -> NixlAgent:
        if self._serving is None:
            raise LocalProtocolError(
                "the nixl transport is used before its memory is registered, or after it is closed"
            )
        return self._serving

    def _open_agent(self, regions: Sequence[Region], num_threads: int) -> NixlAgent | None:
        """None when NIXL cannot carry such memory."""
        agent = NixlAgent.open(self._backends, num_threads, regions[0].memory, regions[0].device)
        if agent.register(regions):
            return agent
        agent.close()
        return None

    def _open_posting_agent(self) -> NixlAgent:
        try:
            # UCX would have threads for long batches only. Each costs 11 files, 17 ms at the start
            # and a connection to every peer.
            agent = self._open_agent(
                self._regions, 0 if self._backends == ("UCX",) else self._num_threads
            )
        except ConfigError as error:
            raise TransportError(
                f"NIXL has served so far, but does not start again ({error})"
            ) from error
        if agent is None:
            raise TransportError(
                "NIXL does not register our memory for one agent more; is there a limit on locked "
                "memory (ulimit -l)?"
            )
        return agent

    def _start(self, peer: PeerId, segments: Sequence[Segments], operation: str) -> Handle:
        link = self._links.get(peer)
        if link is None:
            raise TransportError(f"peer {peer} is not connected over nixl")
        check_segments(segments, self._regions, link.regions, peer)
        return self._enqueue(link, operation, self._batches(segments, link))

    def _enqueue(self, link: NixlLink, operation: str, batches: Iterator[Descriptors]) -> Handle:
        try:
            agent = self._posting.reach(link, self._transfers, self._open_posting_agent)
        except TransportError as error:
            self._fail(link, str(error))
            raise
        self._last_handle += 1
        transfer = NixlTransfer(Handle(self._last_handle), link, agent, operation, batches)
        self._transfers.append(transfer)
        return transfer.handle

    def _batches(self, segments: Sequence[Segments], link: NixlLink) -> Iterator[Descriptors]:
        """Descriptors are made when the first batch is posted, not when the transfer is asked
        for.
        """
        local, remote = self._regions, link.regions
        yield from batches(
            descriptors_between(segments, local, remote),
            MAX_BATCH_BYTES[local[0].memory],
            MAX_BATCH_DESCRIPTORS,
        )

    def _progress(self, agent: NixlAgent) -> None:
        is_known = time.monotonic() < self._known_until
        # The thread's own CPU time: a call that was merely interrupted did not move anything.
        began = 0.0 if is_known else time.thread_time()
        notes = agent.progress()
        if notes and self._notes is not None and agent is self._serving:
            self._notes.extend(note for note in notes if len(note) <= MAX_NOTE_BYTES)
        if not is_known and time.thread_time() - began > BUSY_S:
            self._busy_until = time.monotonic() + BUSY_MEMORY_S

    def _is_busy(self) -> bool:
        return time.monotonic() < self._busy_until

    def _check(self, transfer: NixlTransfer) -> None:
        try:
            transfer.collect()
        except TransportError as error:
            self._fail(transfer.link, str(error))
        if self._posting.needs_agent_close(transfer):
            self._give_up(transfer.agent, transfer.link)

    def _post_next(self) -> NixlTransfer | None:
        """One batch of the transfer whose turn it is: that transfer."""
        for _ in range(len(self._transfers)):
            transfer = self._transfers[0]
            self._transfers.rotate(-1)
            if not transfer.can_post:
                continue
            try:
                transfer.post()
            except TransportError as error:
                self._fail(transfer.link, str(error))
            return transfer
        return None

    def _give_up(self, agent: Agent, link: NixlLink) -> None:
        """A peer is silent: whatever waits for it there waits in vain, and need not be patient once
        more.
        """
        why = f"peer {link.peer} did not end a stopped transfer"
        for transfer in self._transfers:
            if transfer.link is link and transfer.agent is agent:
                transfer.stop(why, agent.last_completed_at(link))
        if self._posting.is_in_use(agent):
            self._fail(link, why)

    def _fail(self, link: NixlLink, why: str) -> None:
        """A connection has failed, and with it, if it is still in use, whatever else goes by the
        same agent.
        """
        is_current = self._links.get(link.peer) is link
        for each in [
            each for each in self._links.values() if is_current and each.agent == link.agent
        ]:
            self._drop(each, why)
        self._drop(link, why)

    def _drop(self, link: NixlLink, why: str) -> None:
        """Stop using a connection. Its agent is forgotten once nothing is posted to it."""
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            if not any(other.agent == link.agent for other in self._links.values()):
                self._posting.leave(link.agent)
        for transfer in self._transfers:
            if transfer.link is link:
                transfer.stop(why, time.monotonic())
