"""The contracts between transfer workers and transports.

Engines, connectors and transfer workers see transports only through the protocols in this module.
The docstring of each protocol is its contract, and names the thread that makes the calls. This
module holds no state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

# Names that implementations and users of transports need too.
from kvferry.protocol.messages import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from kvferry.protocol.messages import TransportOffer as TransportOffer
from kvferry.protocol.planning.plan import BlockPermutation as BlockPermutation
from kvferry.protocol.planning.plan import Segments as Segments
from kvferry.protocol.tickets import NO_BLOCK as NO_BLOCK
from kvferry.types import PeerId, Region
from kvferry.types import Route as Route


class Operation(StrEnum):
    """What a transfer does with the peer's memory; the values are the names that NIXL uses."""

    READ = "READ"
    WRITE = "WRITE"


class CacheMemory(Protocol):
    """One contiguous, writable, zeroed, page-aligned buffer that holds a worker's KV cache.

    The engine asks for one buffer per worker at start-up and builds its tensors in the buffer.
    The caller that allocated the buffer owns it and closes it.
    """

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def buffer(self) -> memoryview:
        """The bytes of the buffer, writable; the view is valid until `close`."""

    def close(self) -> None:
        """Free the memory. Idempotent. No view of `buffer` may be used afterwards."""


# -- data transport --
# Moves bytes between the registered memory of two transfer workers.

Handle = NewType("Handle", int)


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one transfer, or of one revocation of a write grant."""

    handle: Handle
    error: str | None
    """Why the transfer failed; None if it succeeded."""
    total_bytes: int = 0
    segments: int = 0
    """Number of descriptors or copies used after coalescing."""
    post_s: float = 0.0
    """Seconds that this side spent preparing and submitting the transfer."""
    transfer_s: float = 0.0
    """Seconds from the start of the transfer until it ended."""
    device_s: float | None = None
    """Seconds that the device spent on the copies, if the transport was asked to measure. Excludes
    the time before the copies were submitted and the time until `poll` noticed that they were done.
    """

    @property
    def ok(self) -> bool:
        return self.error is None


class DataTransport(Protocol):
    """Moves bytes between the caches of two transfer workers.

    Contract, checked by `kvferry.testing.transport_conformance` on every implementation:

    - One thread owns the transport and makes every call. No call blocks for longer than one
      bounded slice of work.
    - `register` is called once, before any other call. The result says whether the transport can
      carry this memory.
    - `offer` describes this side for the handshake; `connect` takes the other side's offer. The
      content of an offer is opaque to everything but the transport.
    - `read` and `write` return at once with a handle. `poll` does the work, or starts it, and
      yields each handle exactly once, as done or failed. A failed transfer may have written some
      of its local (read) or remote (write) bytes, but never a byte outside the transfer.
    - Offsets and region indexes are checked against both registrations before any address is
      computed: LocalProtocolError if our side is wrong, TransportError if the peer's side is. A
      transport may defer the check of a segment until it copies the segment, because a transfer
      can have thousands of segments; the transfer then fails.
    - `cancel` is safe at any time. `poll` still yields the handle, as failed with `cancelled`,
      once the transport no longer touches local memory for this transfer. Bytes that a failed
      write has sent may still arrive in the peer's memory: the peer must not reuse that memory
      until its own transport reports that no more bytes can arrive.
    - A transport with write grants (`supports_write_grants`) gives the peer that certainty. Other
      sides write into our memory only under a grant id that we issued together with the blocks
      that may be written. The transport refuses every other write: the write fails at the writer,
      with the reason, nothing lands outside the granted blocks, and the writer's other transfers
      go on. After `revoke_writes`, once `poll` has yielded the handle, no byte lands under that
      grant id, whatever the writer does and whether or not the writer is still alive. A grant id
      is issued only once: if it were issued again, a late write under the old grant would be
      admitted.
    - A peer that has died causes failed completions, never a crash or a hang. `disconnect` drops
      everything held for the peer and fails the transfers with it.
    - `close` is complete and idempotent: it leaves no mapping, handle, thread or file behind.
    """

    @property
    def name(self) -> str: ...

    def register(self, regions: Sequence[Region]) -> bool:
        """Make our regions reachable for peers. Returns False, with nothing changed, if this
        transport cannot carry this kind of memory.
        """

    def offer(self) -> TransportOffer: ...

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        """Prepare to reach a peer's regions, whose addresses are valid in the peer's process.
        TransportError if the peer cannot be reached. A second `connect` replaces the first.
        """

    def disconnect(self, peer: PeerId) -> None:
        """Unknown peers are ignored."""

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        """Copy the peer's bytes into our regions. TransportError if the peer is not connected."""

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        """Copy our bytes to the peer, under a grant id that the peer issued (0: none; peers without
        write grants ignore the id). TransportError if the peer is not connected, or if the
        transport only reads.
        """

    @property
    def supports_write_grants(self) -> bool: ...

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        """Allow peers to write under this grant id (1 to 2**64 - 1) into these blocks only.

        `blocks` lists block ids by group (`Region.group`). LocalProtocolError if the transport has
        no write grants, if the grant id is active already, or if a block id does not exist.
        """

    def revoke_writes(self, grant_id: int) -> Handle:
        """End a grant: in the very next `poll` if nothing is being received under it. Unknown grant
        ids are allowed. LocalProtocolError if the transport has no write grants.
        """

    def poll(self) -> list[Completion]:
        """Return the transfers and revocations that have ended since the last call."""

    def cancel(self, handle: Handle) -> None:
        """Stop a transfer as soon as possible. Ended and unknown handles are ignored."""

    def poll_interval_s(self) -> float | None:
        """How soon `poll` should be called again: 0 for at once, None if no transfer is active."""

    def serving_interval_s(self) -> float | None:
        """How often `poll` must run while a peer may be reading our memory; None if peers can read
        without help from this process.
        """

    def close(self) -> None: ...


# -- control transport --
# Carries small messages between transfer workers, and to the scheduler's side channel.


@dataclass(frozen=True, slots=True)
class Received:
    """A frame arrived; `route` leads back to the sender."""

    route: Route
    frame: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection that we dialled to `address` is gone."""

    address: str


ControlEvent = Received | Disconnected


class ControlTransport(Protocol):
    """Carries small messages between transfer workers, and to the scheduler's side channel.

    Contract:

    - One thread owns the transport and makes every call except `wake`, which any thread may call.
    - `send` dials on first use and never waits. Frames queue until the other side is connected;
      when the queue is full, `send` raises TransportError.
    - Frames between two sides arrive whole, in order, and at most once. Frames longer than
      `MAX_MESSAGE_BYTES` are dropped and counted.
    - Frames from a sender without the cluster's keys never arrive.
    - `poll` waits for at most `timeout_s` or until `wake`, and returns the events so far. Nothing
      that a peer sends makes `poll` raise.
    - When a dialled peer goes away, `poll` reports one `Disconnected` and the connection is
      dropped. The next `send` dials again.
    """

    @property
    def address(self) -> str:
        """The address that peers dial: `tcp://host:port`, never a wildcard."""

    def send(self, address: str, frame: bytes) -> None: ...

    def reply(self, route: Route, frame: bytes) -> None:
        """Answer on the connection that a frame arrived on. Ignored if that connection is gone."""

    def poll(self, timeout_s: float | None) -> list[ControlEvent]: ...

    def wake(self) -> None: ...

    def forget(self, address: str) -> None:
        """Close the connection that we dialled to an address, without a `Disconnected` event.
        Unknown addresses are ignored.
        """

    def close(self) -> None: ...


# -- block store --
# Rearranges blocks of the local cache and copies them to and from a host buffer.


StoreHandle = NewType("StoreHandle", int)


@dataclass(frozen=True, slots=True)
class StoreCompletion:
    """The end of one job. If `error` is set, the content of the job's blocks is undefined."""

    handle: StoreHandle
    error: str | None


class BlockStore(Protocol):
    """The local cache memory, with the operations that a transfer worker applies to its blocks.

    Transports read and write the regions that were registered with them. These regions are either
    the engine's own cache, or a host buffer: a copy of the cache in host memory with the same block
    ids. With a host buffer, `copy_to_host_buffer` runs before peers read the blocks, and `place`
    copies blocks that have arrived from the host buffer to the engine.

    Contract, checked by `tests/transports/test_block_store.py`:

    - One thread owns the store and makes every call. No call blocks for longer than one bounded
      slice of work, about a millisecond.
    - `place` and `copy_to_host_buffer` return at once with a handle; `poll` does the work and
      yields each handle exactly once, as done or failed.
    - Regions, offsets, strides and block ids are checked before any address is computed:
      LocalProtocolError, with no job started.
    - After a job has started, errors are values: `StoreCompletion.error`. The store no longer
      touches the blocks of a failed job, and their content is undefined.
    - A job is never stopped halfway: a caller that wants to reuse the blocks waits for the handle.
    - Jobs run in no particular order. Two active jobs must not write the same block, unless they
      write the same bytes.
    - The engine has finished writing the blocks before `copy_to_host_buffer` is called, and uses
      placed blocks only after `poll` has yielded the handle. If the engine reuses blocks during
      `copy_to_host_buffer` (a preemption), the copy is useless, and the caller must not announce
      these blocks to any peer.
    - `close` is complete and idempotent; active jobs are dropped.
    """

    def place(
        self, permutations: Sequence[BlockPermutation], blocks: Sequence[Sequence[int]] = ()
    ) -> StoreHandle:
        """Permute blocks that have arrived into the local layout, in place. With a host buffer,
        then copy `blocks` (block ids by group) from the host buffer to the engine.
        """

    def copy_to_host_buffer(self, blocks: Sequence[Sequence[int]]) -> StoreHandle:
        """Copy `blocks` (block ids by group) from the engine to the host buffer that transports
        see. Holes are skipped.
        """

    def poll(self) -> list[StoreCompletion]:
        """Work for a bounded time and return the jobs that have ended since the last call."""

    def poll_interval_s(self) -> float | None:
        """How soon `poll` should be called again: 0 for at once, None if there is no job."""

    def close(self) -> None: ...


# -- engine stream --
# Reports when a GPU has finished the work that the engine submitted asynchronously.


class StreamEvent(Protocol):
    """A point in the engine's stream of GPU work."""

    def is_complete(self) -> bool: ...


class EngineStream(Protocol):
    """The stream on which an engine submits its GPU work.

    When the engine hands blocks to a transfer worker, the GPU may still be writing the blocks, or
    still reading their previous content. The worker must not let a peer read or fill the blocks
    before that work is done. So the engine's thread marks its stream when it notifies the worker,
    and the worker acts on the notification once the marked event is complete.

    - The engine's thread calls `mark`; the transfer worker's thread calls `is_complete` as often as
      it likes. Neither call waits.
    - An event is complete once everything that the engine submitted before `mark` is done and
      visible to other streams and processes.
    """

    def mark(self) -> StreamEvent | None:
        """Record an event after all work submitted so far; None if there is nothing to wait for."""


class HostStream:
    """The stream of an engine that computes on its own thread: its work is always complete."""

    def mark(self) -> StreamEvent | None:
        return None


# -- rows in host memory --
# Copies between a cache and the rows of a storage tier (kvferry/tiers).


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """One row of host memory and the blocks of the cache whose bytes it holds.

    In a row, the blocks follow each other; within a block, the group's regions follow each other in
    the order in which the copier was given them:

        row     | block 0                          | block 1 …
                | region a | region b | …          | region a | …
    """

    address: int
    group: int
    block_ids: tuple[int, ...]


class RowCopier(Protocol):
    """Copies blocks of one rank's cache to and from rows of host memory.

    Each call blocks its thread until all bytes have arrived, without the GIL. Two threads may call
    at once if they copy different rows and blocks. Both calls return a checksum of each row, over
    the bytes as they arrived at their destination: so the result of `load` proves the bytes in the
    cache, whatever other processes did to the row meanwhile.
    """

    def row_bytes(self, group: int, num_blocks: int) -> int: ...

    def save(self, rows: Sequence[RowBlocks]) -> list[int]:
        """Copy from the cache to the rows, and return the checksums (64 bits)."""

    def load(self, rows: Sequence[RowBlocks]) -> list[int]:
        """Copy from the rows to the cache, and return the checksums (64 bits)."""

    def copy_row(self, row: RowBlocks, target: int) -> int:
        """Copy a row to another address of host memory, and return its checksum."""

    def pin(self, address: int, size_bytes: int) -> None:
        """Prepare host memory for fast copies. Failure to pin only makes copies slower."""

    def unpin(self, address: int) -> None: ...

    def close(self) -> None: ...


# -- transport kit --
# Makes transports for an engine, so that engines and connectors never import an implementation.


class TransportKit(Protocol):
    """Makes the transports and block stores of one engine.

    A composition root builds the kit and passes it down; engines and connectors never import a
    transport. A kit must be picklable, because worker processes are spawned with it.
    """

    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        """Allocate memory for a worker's KV cache that as many transports as possible can carry."""

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        """Make new, unregistered data transports in order of preference."""

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        """Make the store that rearranges blocks in a worker's registered regions."""

    def host_buffer_store(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory
    ) -> BlockStore:
        """Make the store for a worker with a host buffer. Transports see `host_buffer`, which lies
        in `memory` (allocated by this kit) and has one region for each of the engine's regions.
        """

    def row_copier(self, regions: Sequence[Region]) -> RowCopier:
        """Make the copier between a worker's registered regions and rows of host memory."""

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        """Return the stream that reports when an engine with these regions has finished its GPU
        work.
        """

    def control_transport(self) -> ControlTransport:
        """Make a worker's control transport, bound to a free port of the advertised interface."""

    def side_channel(self) -> ControlTransport:
        """Make the scheduler's side channel, bound to the configured port."""
