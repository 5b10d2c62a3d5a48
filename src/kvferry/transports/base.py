"""Where an engine's KV cache lives, so that transports can reach it.

The engine asks for one buffer per worker at start-up and builds its tensors in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvferry.protocol.planning import BlockPermutation, Segments
from kvferry.protocol.tickets import HOLE
from kvferry.types import PeerId, Region, Route

__all__ = [
    "HOLE",
    "MAX_FRAME_BYTES",
    "BlockPermutation",
    "BlockStore",
    "CacheAllocator",
    "CacheMemory",
    "Completion",
    "ControlEvent",
    "ControlTransport",
    "DataTransport",
    "Disconnected",
    "EngineStream",
    "Handle",
    "HostStream",
    "Received",
    "Route",
    "Segments",
    "StoreCompletion",
    "StoreHandle",
    "StreamEvent",
    "TransportKit",
    "TransportOffer",
]


class CacheMemory(Protocol):
    """One contiguous writable buffer, zeroed, page aligned. Its owner is whoever allocated it."""

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def buffer(self) -> memoryview:
        """The bytes, writable; valid until `close`."""

    def close(self) -> None:
        """Give the memory back. Idempotent. No view of `buffer` may be used afterwards."""


class CacheAllocator(Protocol):
    def allocate(self, size_bytes: int) -> CacheMemory: ...


# -------------------- data --------------------
# The data transport: a way to move bytes between the caches of two workers.
#
# Contract, checked by `kvferry.testing.transport_conformance` on every implementation:
#
# - One thread owns a transport and makes every call. Nothing here blocks for longer than one
#   bounded slice of work.
# - `register` is called once, before anything else. It answers whether this transport can carry
#   that memory.
# - `offer` describes this side for the handshake; `connect` takes the other side's offer. Both are
#   opaque to all but the transport.
# - `read` and `write` return at once with a handle; `poll` does the work or asks for it, and yields
#   each handle exactly once, done or failed. A failed transfer may have written some of its local
#   (read) or remote (write) bytes, never any other byte.
# - Offsets and region numbers are checked against both registrations before any address is
#   computed: LocalProtocolError for ours, TransportError for the peer's. Of thousands of segments a
#   transport may look at each when its turn comes; then the transfer fails.
# - `cancel` is safe at any time. The handle is still yielded by `poll`, as failed with `cancelled`,
#   once its memory here is no longer touched. What a failed write has sent may still arrive in the
#   peer's memory: its owner must not use that before it knows better.
# - A transport that supports write grants (`supports_write_grants`) is how an owner knows better.
#   Peers write there only under a number that its owner has lent with the blocks it is for; any
#   other write ends at the writer as failed, with the reason, and nothing lands outside those
#   blocks. That costs the writer none of its other transfers. The owner takes the number back, and
#   once `poll` has yielded that handle no byte lands under it, whatever the writer does and whether
#   it lives. A number is lent once: a late write under a grant id that was issued again would be
#   let in.
# - A peer that has died yields failed completions, never a crash or a hang. `disconnect` drops all
#   that is held for it, and fails its transfers.
# - `close` is complete and idempotent: no mapping, handle, thread or file is left.


Handle = NewType("Handle", int)


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """What one side says of a transport in the handshake."""

    transport: str
    reach: str
    """Only sides with equal reach can use the transport together; empty: anywhere. (shm: host, user
    and pid namespace.)
    """
    blob: bytes
    near: str = ""
    """Sides with other values use the transport together only when no other reaches across; empty:
    as good as anywhere. (nixl without RDMA: the host.)
    """


@dataclass(frozen=True, slots=True)
class Completion:
    handle: Handle
    error: str | None
    total_bytes: int
    segments: int
    """Descriptors or copies really used, after coalescing."""
    post_s: float
    transfer_s: float
    device_s: float | None = None
    """What a device has spent on it, where a transport was asked to tell: not the time until it was
    told to, and until somebody saw it.
    """

    @property
    def ok(self) -> bool:
        return self.error is None


class DataTransport(Protocol):
    @property
    def name(self) -> str: ...

    def register(self, regions: Sequence[Region]) -> bool:
        """Make our regions reachable. False, with nothing changed, when this transport cannot carry
        such memory.
        """

    def offer(self) -> TransportOffer: ...

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        """Prepare to reach a peer's regions (their addresses are valid in the peer). TransportError
        when it cannot be reached. Connecting twice replaces the first connection.
        """

    def disconnect(self, peer: PeerId) -> None:
        """Drop everything held for a peer; its transfers fail. Unknown peers are ignored."""

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        """Start copying the peer's bytes here. TransportError when the peer is not connected."""

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        """Start copying our bytes to the peer, under a number that it has lent (0: none; peers
        without a fence ignore it). TransportError when the peer is not connected.
        """

    @property
    def supports_write_grants(self) -> bool:
        """Whether peers write here only under a grant id that was issued to them, and
        `revoke_writes` certainly ends it.
        """

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        """Peers may write under this number (1 to 2**64 - 1) into these blocks (ids, by group:
        `Region.group`) from now on, and nowhere else. Only where writes are fenced:
        LocalProtocolError elsewhere, for a number that is lent, and for blocks that there are not.
        """

    def revoke_writes(self, grant_id: int) -> Handle:
        """End it; `poll` yields the handle once no byte of a peer lands under this number any more
        (in the very next poll when nothing is being received under it). Unknown numbers too. Only
        where writes are fenced.
        """

    def poll(self) -> list[Completion]:
        """Make progress for a bounded time and return what has ended since the last call."""

    def cancel(self, handle: Handle) -> None:
        """Stop a transfer as soon as possible. Ended or unknown handles are ignored."""

    def poll_interval_s(self) -> float | None:
        """How soon `poll` wants to be called again: 0 for at once, None when nothing moves here."""

    def serving_interval_s(self) -> float | None:
        """How often `poll` must run while a peer may be reading our memory; None when peers need no
        help from us.
        """

    def close(self) -> None: ...


# -------------------- control --------------------
# The control transport: small messages between transfer workers, and to a side channel.
#
# Contract:
#
# - One thread owns a transport and makes every call but `wake`, which any thread may make.
# - `send` dials on first use and never waits: frames queue until the other side is there, up to a
#   bound, then TransportError.
# - Frames between two sides arrive whole, in order, at most once. None is larger than
#   `MAX_FRAME_BYTES` (longer ones are dropped and counted).
# - Frames from anybody without the cluster's keys never arrive.
# - `poll` waits at most `timeout_s` or until `wake`, and returns what has arrived. Nothing a peer
#   sends makes it raise.
# - A dialled peer that goes away is reported once as `Disconnected`; the connection is dropped with
#   it (the next `send` dials again).


MAX_FRAME_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Received:
    route: Route
    frame: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    address: str


ControlEvent = Received | Disconnected


class ControlTransport(Protocol):
    @property
    def address(self) -> str:
        """What peers dial: `tcp://host:port`, never a wildcard."""

    def send(self, address: str, frame: bytes) -> None: ...

    def reply(self, route: Route, frame: bytes) -> None:
        """Answer on the connection a frame came from. A route that is gone is ignored."""

    def poll(self, timeout_s: float | None) -> list[ControlEvent]: ...

    def wake(self) -> None: ...

    def forget(self, address: str) -> None:
        """Close the connection we dialled to an address, silently. Unknown addresses are
        ignored.
        """

    def close(self) -> None: ...


# -------------------- block store --------------------
# The block store: our own cache memory, as the transfer worker may rearrange and copy it.
#
# Transports read and write the regions that were registered with them. Those are the engine's own
# cache, or a host buffer of it in host memory with the same block numbers (a *staged* cache): then
# blocks are exposed in the host buffer before peers read them, and brought from it when they have
# arrived.
#
# Contract, checked by `tests/transports/test_block_store.py`:
#
# - One thread owns a store and makes every call. Nothing here blocks for longer than one bounded
#   slice of work, about a millisecond.
# - `place` and `copy_to_host_buffer` return at once with a handle; `poll` does the work and yields
#   each handle exactly once, done or failed.
# - Regions, offsets, strides and block numbers are checked before any address is computed:
#   LocalProtocolError, with nothing begun.
# - Once begun, errors are values: `StoreCompletion.error`. Blocks of a failed job are no longer
#   touched, and what is in them is worthless.
# - A job is never stopped halfway: whoever wants the blocks back waits for its handle.
# - Jobs do not order each other. No two that are under way may write the same block, unless they
#   write the same bytes.
# - The engine has finished writing the blocks that are exposed, and touches those that are placed
#   only after the handle has come back. If it takes exposed blocks back before (a preemption), what
#   is copied is worthless, and whoever asked for it says so to nobody.
# - `close` is complete and idempotent; what was under way is dropped.


StoreHandle = NewType("StoreHandle", int)


@dataclass(frozen=True, slots=True)
class StoreCompletion:
    """A job has ended: its blocks are as they were asked for, or worthless."""

    handle: StoreHandle
    error: str | None


class BlockStore(Protocol):
    def place(
        self, permutations: Sequence[BlockPermutation], blocks: Sequence[Sequence[int]] = ()
    ) -> StoreHandle:
        """Put what has arrived into our own order, in place. Then, of a staged cache, copy these
        blocks of each group to the engine.
        """

    def copy_to_host_buffer(self, blocks: Sequence[Sequence[int]]) -> StoreHandle:
        """Copy these blocks of each group from the engine to where transports see them. Holes are
        left out.
        """

    def poll(self) -> list[StoreCompletion]:
        """Work for a bounded time and return what has ended since the last call."""

    def poll_interval_s(self) -> float | None:
        """How soon `poll` wants to be called again: 0 for at once, None when there is nothing to
        do.
        """

    def close(self) -> None: ...


# -------------------- order -------------------- The order of an engine's own work, where that work
# goes on after the engine has asked for it (a GPU's stream).
#
# A transfer worker that is told of blocks must not show them, nor let a peer fill them, before the
# device has done what the engine asked of it until then: it writes the blocks, or still reads what
# was in them before. So the engine's thread marks its order when it says something, and what it
# said counts from when the mark has been passed.
#
# - `mark` is called by the engine's thread; `is_complete` by the transfer worker's, as often as it
#   likes. Neither waits.
# - A mark is passed once everything is done, and seen by other streams and processes, that the
#   engine asked for before.


class StreamEvent(Protocol):
    def is_complete(self) -> bool: ...


class EngineStream(Protocol):
    def mark(self) -> StreamEvent | None:
        """None: there is nothing to wait for."""


class HostStream:
    """Of an engine that computes on its own thread: what it has asked for is done."""

    def mark(self) -> StreamEvent | None:
        return None


# -------------------- kit --------------------
# What a composition root hands down to an engine: the makers of transports.
#
# Engines and connectors never import a transport; they get this. It must be picklable, because
# worker processes are spawned with it.


class TransportKit(Protocol):
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        """Memory for a worker's KV cache that as many transports as possible can carry."""

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        """Fresh, unregistered data transports in order of preference."""

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        """What rearranges the blocks of a worker's registered regions."""

    def host_buffer_store(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory
    ) -> BlockStore:
        """The same for a staged cache: transports see `host_buffer`, which lies in `memory` (of
        this kit) and follows the engine's regions.
        """

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        """When what an engine with these regions has asked for is done."""

    def control_transport(self) -> ControlTransport:
        """A worker's control transport, bound to a free port of the advertised interface."""

    def side_channel(self) -> ControlTransport:
        """The scheduler's side channel, bound to the configured port."""
