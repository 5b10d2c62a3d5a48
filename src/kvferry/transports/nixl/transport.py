"""The `nixl` data transport: moves KV over every network that NIXL supports (UCX by default).

Owned by one thread. NIXL itself is behind `agent.py`. The transport has two kinds of agents.
`offer` hands out the *serving* agent: peers read and write through the serving agent, which posts
nothing and lives as long as the transport. Our own transfers are posted on a *posting* agent, which
is opened for the first connected peer and can be closed separately: only closing the posting agent
certainly stops a transfer with a silent peer (`transfer.AgentPool`).

Facts about NIXL 1.5.1 with UCX 1.23:

- A post may copy all bytes before returning (CMA). So transfers are posted in bounded batches, at
  most one per `poll`.
- NIXL's progress thread takes a whole core while idle, so the thread is off, and `poll` drives
  progress. The reading side always needs progress. The side that is read needs progress while a
  connection is being established, and on emulated transports (tcp) for every byte; see
  `serving_interval_s`.
- A peer that dies shows as an error of the next status call, within milliseconds on one host. A
  peer that is stopped or cut off is merely silent.
- Bytes of a *write* that the network already has arrive whatever happens to the agent: only the
  peer knows when the written memory is at rest.
"""

import os
import time
from collections.abc import Iterator, Sequence
from enum import Enum

import msgspec

from kvferry.errors import ConfigError, TransportError
from kvferry.transports.base import Handle, Operation, Segments, TransportOffer
from kvferry.transports.copy.segments import Descriptors, batches, check_regions
from kvferry.transports.linked import LinkedTransport, decoded_offer
from kvferry.transports.locality import nixl_locality
from kvferry.transports.nixl.agent import REMAPPED_MEMORY, NixlAgent, NixlLink
from kvferry.transports.nixl.transfer import AgentPool, NixlTransfer
from kvferry.types import MemoryKind, PeerId, Region

MAX_BATCH_BYTES = {MemoryKind.DRAM: 32 * 1024 * 1024, MemoryKind.VRAM: 1024 * 1024 * 1024}
"""Largest batch of one post. Host memory is copied before the post returns.

Device memory is copied by the device, and each post costs more than the copy of many bytes.
"""
MAX_BATCH_DESCRIPTORS = 1000
"""Largest number of descriptors in a batch.

From 1,024 descriptors on, NIXL divides a batch among several threads. The threads spin while a
transfer runs, on cores that the engine needs, and each thread has a separate connection, so an
error of one connection says nothing about the rest of the batch.
"""
CANCEL_TIMEOUT_S = 5.0
"""How long a stopped transfer waits for the peer before the agent must be closed.

Counted from the stop or from the peer's last completed batch, whichever is later. A peer that
answers ends the transfer sooner, and the connection stays open. A batch of 32 MiB in this time is a
link of 54 Mbit/s.
"""
BUSY_S = 120e-6
"""A progress call that took longer has moved bytes.

An idle call takes 3 µs when repeated at once, and 60 µs with cold caches.
"""
BUSY_MEMORY_S = 0.02
"""How long the transport counts as busy after a progress call of more than BUSY_S."""
BUSY_INTERVAL_S = 0.001
SERVING_INTERVAL_S = 0.01
QUIET_AFTER_S = 1.0
QUIET_SERVING_INTERVAL_S = 0.1
"""How often to poll while peers may read, but nothing has moved for QUIET_AFTER_S.

A tick of the transfer worker takes 0.3 ms with cold caches, and an idle process shall use less than
1 % of a core. The transfer worker polls more often when a read is likely to begin.
"""
DRAIN_TIMEOUT_S = 2.0
MAX_NOTES, MAX_NOTE_BYTES = 1024, 256 * 1024
"""Limits on notifications; those beyond the limits are dropped. Any process that can reach NIXL can
send notifications.
"""


class NetworkReach(Enum):
    """Interfaces on which NIXL can be reached."""

    ANYWHERE = "anywhere"
    THIS_HOST = "this host"


class NixlOffer(msgspec.Struct, frozen=True, array_like=True):
    """What a peer needs to reach our serving agent."""

    agent: str
    metadata: bytes


class NixlTransport(LinkedTransport[NixlLink, NixlTransfer]):
    """Implements `base.DataTransport` on NIXL. NIXL is not loaded before `register`."""

    name = "nixl"

    def __init__(
        self,
        backends: Sequence[str] = ("UCX",),
        num_threads: int = 4,
        reach: NetworkReach = NetworkReach.ANYWHERE,
        cancel_timeout_s: float = CANCEL_TIMEOUT_S,
        *,
        memory_may_go: bool = False,
    ) -> None:
        """`memory_may_go`: the registered memory may be freed after `close`, and other memory may
        get its addresses.
        """
        super().__init__()
        self._memory_may_go = memory_may_go
        self._backends = tuple(backends)
        self._reach = reach
        self._num_threads = num_threads
        self._serving: NixlAgent
        self._posting = AgentPool(
            self._transfers.values(), self._open_posting_agent, cancel_timeout_s
        )
        self._added: list[Region] = []
        """Memory registered later, which transfers name by address only (`move`)."""
        self._busy_until = 0.0
        self._known_until = 0.0
        """Until then progress is not measured, because `poll` is called constantly."""
        self._is_serving_polled = False
        """Whether `take_notes` has driven the progress that the next `poll` would drive."""

    def _open(self, regions: tuple[Region, ...]) -> bool:
        if len({(region.memory, region.device) for region in regions}) != 1:
            return False
        if self._reach is NetworkReach.THIS_HOST:
            # UCX listens on every interface, and trusts every peer that speaks UCX's wire format.
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        serving = self._open_agent(regions, num_threads=0)  # the serving agent posts nothing
        if serving is None:
            return False
        self._serving = serving
        return True

    def offer(self) -> TransportOffer:
        self._check_open()
        near = nixl_locality(self._backends, os.environ)
        return TransportOffer(self.name, "", msgspec.msgpack.encode(self.identity()), near)

    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> NixlLink:
        return self._connected(peer, decoded_offer(peer, offer, NixlOffer), regions)

    def _connected(self, peer: PeerId, offer: NixlOffer, regions: tuple[Region, ...]) -> NixlLink:
        if (
            offer.agent == self._serving.name
            or len({(region.memory, region.device) for region in regions}) != 1
        ):
            raise TransportError(
                f"the nixl offer of {peer} names this engine itself, or memory of several "
                "kinds; drop this peer"
            )
        self.disconnect(peer)  # a connection that has failed must go before the next one
        link = NixlLink(peer, regions, offer.agent, offer.metadata)
        self._posting.reach(link)
        return link

    def _post(
        self,
        link: NixlLink,
        segments: Sequence[Segments],
        operation: Operation,
        grant_id: int = 0,
        handle: Handle | None = None,
    ) -> NixlTransfer:
        max_bytes = MAX_BATCH_BYTES[self._regions[0].memory]
        cut = self._cut(segments, link, max_bytes, MAX_BATCH_DESCRIPTORS)
        return self._transfer(handle or self._next_handle(), link, operation, cut)

    def _progress(self) -> None:
        if not self._is_serving_polled:
            self._poll_agent(self._serving)
        self._is_serving_polled = False
        if not self._links and not self._transfers and self._posting.is_settled:
            return
        for agent in self._posting.connected():
            self._poll_agent(agent)
        for transfer in self._transfers.values():
            self._check(transfer)
        posting = self._next_in_turn(lambda each: each.can_post)
        if posting is not None:
            try:
                posting.post()
            except TransportError as error:
                self._fail(posting.link, str(error))
            # Between processes of one host a read has often completed when the post returns.
            self._check(posting)
        self._posting.advance()
        self._ended.extend(each.completion() for each in self._transfers.values() if each.has_ended)

    def _disconnect(self, link: NixlLink, why: str) -> None:
        """The peer's agent is removed once no transfer to the peer is posted."""
        if not any(other.agent == link.agent for other in self._links.values()):
            self._posting.leave(link.agent)
        super()._disconnect(link, why)

    def poll_interval_s(self) -> float | None:
        if not self._transfers:
            return None if self._posting.is_settled else BUSY_INTERVAL_S
        can_move = self.can_post or any(each.has_ended for each in self._transfers.values())
        return 0.0 if can_move or self._is_busy() else BUSY_INTERVAL_S

    def serving_interval_s(self) -> float | None:
        if self._is_busy():
            return BUSY_INTERVAL_S
        is_quiet = time.monotonic() >= self._busy_until + QUIET_AFTER_S
        return QUIET_SERVING_INTERVAL_S if is_quiet else SERVING_INTERVAL_S

    def _close(self) -> None:
        """Wait a bounded time for posted batches, then close all agents.

        No byte is written afterwards.
        """
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while self._transfers and time.monotonic() < deadline:
            self.poll()
        self._posting.close()
        self._serving.close()

    # -- for transfers through bounce buffers --

    def start(
        self, peer: PeerId, segments: Sequence[Segments], operation: Operation, handle: Handle
    ) -> Handle:
        """Start a read or write under a handle of `_next_handle`."""
        link = self._linked(peer)
        self._check_segments(segments, link)
        return self._enqueue(self._post(link, segments, operation, handle=handle))

    def add_memory(self, region: Region) -> bool:
        """Register more memory after `register`, for `move`.

        False, with nothing changed, if NIXL cannot register the memory. A peer that is already
        connected needs our new metadata (`identity`, `update_metadata`) to reach the memory.
        """
        if not self._serving.register([region]):
            return False
        try:
            # If NIXL cannot describe the memory, no peer can reach it: undo the registration here.
            self._serving.metadata()
            is_registered = self._posting.register(region)
        except TransportError:
            is_registered = False
        if not is_registered:
            self._serving.deregister_last()
            return False
        self._added.append(region)
        return True

    def update_metadata(self, peer: PeerId, metadata: bytes) -> None:
        """Use newer metadata of a connected peer. TransportError if NIXL refuses the metadata."""
        link = self._linked(peer)
        if metadata == link.metadata:
            return
        # Any link to the agent may be the first that connects the next posting agent.
        for each in self._links.values():
            if each.agent == link.agent:
                each.metadata = metadata
        try:
            self._posting.update_metadata(link)
        except TransportError as error:
            self._fail(link, str(error))
            raise

    def move(self, peer: PeerId, operation: Operation, descriptors: Descriptors) -> Handle:
        """Start a READ or WRITE of segments given by addresses, already joined and checked."""
        link, max_bytes = self._linked(peer), MAX_BATCH_BYTES[self._regions[0].memory]
        cut = batches(descriptors, max_bytes, MAX_BATCH_DESCRIPTORS)
        return self._enqueue(self._transfer(self._next_handle(), link, operation, cut))

    @property
    def can_post(self) -> bool:
        """Whether the next poll posts another batch."""
        return any(transfer.can_post for transfer in self._transfers.values())

    def identity(self) -> NixlOffer:
        """Return what an agent needs to connect, and then to send notifications to us."""
        return NixlOffer(self._serving.name, self._serving.metadata())

    def connect_agent(self, peer: PeerId, offer: NixlOffer, regions: Sequence[Region]) -> None:
        """Connect as `connect` does, with the peer's `identity`."""
        check_regions(regions, peer)
        self._links[peer] = self._connected(peer, offer, tuple(regions))

    def connected_to(self, agent: str) -> PeerId | None:
        """Return a connected peer with this agent."""
        return next((link.peer for link in self._links.values() if link.agent == agent), None)

    def notify(self, peer: PeerId, note: bytes) -> None:
        """Send a notification to a peer.

        Notifications arrive complete and in order, or the connection fails; the sender does not
        learn whether a notification has arrived. TransportError, with the peer disconnected, if the
        peer is known to be gone.
        """
        link = self._linked(peer)
        try:
            self._posting.reach(link).notify(note, link)
        except TransportError as error:
            self._fail(link, str(error))
            raise

    def take_notes(self) -> list[bytes]:
        """Return the notifications sent to us since the last call, from any sender. Before each
        `poll`, in place of its progress of the serving agent.
        """
        self._is_serving_polled = True
        notes = [each for each in self._poll_agent(self._serving) if len(each) <= MAX_NOTE_BYTES]
        return notes[-MAX_NOTES:]

    def _open_agent(self, regions: Sequence[Region], num_threads: int) -> NixlAgent | None:
        """Open an agent with our memory; None if NIXL cannot register the memory."""
        agent = NixlAgent.open(
            self._backends,
            num_threads,
            regions[0].memory,
            regions[0].device,
            REMAPPED_MEMORY if self._memory_may_go else "",
        )
        if agent.register(regions):
            return agent
        agent.close()
        return None

    def _open_posting_agent(self) -> NixlAgent:
        try:
            # With UCX alone, threads are used for long batches only, which are never posted. Each
            # thread costs 11 files, 17 ms at start-up and a connection to every peer.
            agent = self._open_agent(
                [*self._regions, *self._added],
                0 if self._backends == ("UCX",) else self._num_threads,
            )
        except ConfigError as error:
            raise TransportError(
                f"NIXL has started before, but cannot start another agent ({error})"
            ) from error
        if agent is None:
            raise TransportError(
                "NIXL cannot register our memory with another agent; is there a limit on "
                "locked memory (ulimit -l)?"
            )
        return agent

    def _transfer(
        self, handle: Handle, link: NixlLink, operation: Operation, cut: Iterator[Descriptors]
    ) -> NixlTransfer:
        try:
            agent = self._posting.reach(link)
        except TransportError as error:
            self._fail(link, str(error))
            raise
        return NixlTransfer(handle, link, operation, batches=cut, agent=agent)

    def _enqueue(self, transfer: NixlTransfer) -> Handle:
        self._transfers[transfer.handle] = transfer
        return transfer.handle

    def _poll_agent(self, agent: NixlAgent) -> list[bytes]:
        """Drive an agent's progress. Return the notifications that it has received."""
        is_known = time.monotonic() < self._known_until
        # CPU time of this thread, not wall time: a call that was merely preempted moved nothing.
        began = 0.0 if is_known else time.thread_time()
        notes = agent.progress()
        if not is_known and time.thread_time() - began > BUSY_S:
            self._busy_until = time.monotonic() + BUSY_MEMORY_S
        return notes

    def _is_busy(self) -> bool:
        return time.monotonic() < self._busy_until

    def _check(self, transfer: NixlTransfer) -> None:
        try:
            transfer.collect()
        except TransportError as error:
            self._fail(transfer.link, str(error))
        if self._posting.needs_agent_close(transfer):
            self._give_up(transfer.agent, transfer.link)

    def _give_up(self, agent: NixlAgent, link: NixlLink) -> None:
        """Stop all transfers that wait for a silent peer on this agent.

        The timeout has passed once for this peer, so further transfers do not wait once more.
        """
        why = f"peer {link.peer} did not end a stopped transfer"
        for transfer in self._transfers.values():
            if transfer.link is link and transfer.agent is agent:
                transfer.stop(why, agent.last_completed_at(link))
        if self._posting.is_in_use(agent):
            self._fail(link, why)

    def _fail(self, link: NixlLink, why: str) -> None:
        """Drop a connection that has failed, and all links to the same agent with it."""
        if self._links.get(link.peer) is link:
            for each in [each for each in self._links.values() if each.agent == link.agent]:
                self._drop(each, why)
