"""The data transport: a way to move bytes between the caches of two workers.

Contract, checked by `kvferry.testing.plane_conformance` on every implementation:

- One thread owns a transport and makes every call. Nothing here blocks for longer than one bounded slice of work.
- `register` is called once, before anything else. It answers whether this transport can carry that memory.
- `offer` describes this side for the handshake; `connect` takes the other side's offer. Both are opaque to all but the transport.
- `read` and `write` return at once with a handle; `poll` does the work or asks for it, and yields each handle exactly once,
  done or failed. A failed transfer may have written some of its local (read) or remote (write) bytes, never any other byte.
- Offsets and region numbers are checked against both registrations before any address is computed: LocalProtocolError for ours,
  TransportError for the peer's. Of thousands of segments a transport may look at each when its turn comes; then the transfer fails.
- `cancel` is safe at any time. The handle is still yielded by `poll`, as failed with `cancelled`, once its memory here is no longer
  touched. What a failed write has sent may still arrive in the peer's memory: its owner must not use that before it knows better.
- A transport that supports write grants (`supports_write_grants`) is how an owner knows better. Peers write there only under a number that
  its owner has lent with the blocks it is for; any other write ends at the writer as failed, with the reason, and nothing lands outside
  those blocks. That costs the writer none of its other transfers. The owner takes the number back, and once `poll` has yielded that handle
  no byte lands under it, whatever the writer does and whether it lives. A number is lent once: a late write under a grant id that was
  issued again would be let in.
- A peer that has died yields failed completions, never a crash or a hang. `disconnect` drops all that is held for it,
  and fails its transfers.
- `close` is complete and idempotent: no mapping, handle, thread or file is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from kvferry.protocol.planning import Segments
from kvferry.types import PeerId, Region

__all__ = ["Completion", "DataTransport", "Handle", "Segments", "TransportOffer"]

Handle = NewType("Handle", int)


@dataclass(frozen=True, slots=True)
class TransportOffer:
    """What one side says of a transport in the handshake."""

    transport: str
    reach: str
    """Only sides with equal reach can use the transport together; empty: anywhere. (shm: host, user and pid namespace.)"""
    blob: bytes
    near: str = ""
    """Sides with other values use the transport together only when no other reaches across; empty: as good as anywhere. (nixl without RDMA:
    the host.)"""


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
    """What a device has spent on it, where a transport was asked to tell: not the time until it was told to, and until somebody saw it."""

    @property
    def ok(self) -> bool:
        return self.error is None


class DataTransport(Protocol):
    @property
    def name(self) -> str: ...

    def register(self, regions: Sequence[Region]) -> bool:
        """Make our regions reachable. False, with nothing changed, when this transport cannot carry such memory."""

    def offer(self) -> TransportOffer: ...

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        """Prepare to reach a peer's regions (their addresses are valid in the peer). TransportError when it cannot be reached.
        Connecting twice replaces the first connection."""

    def disconnect(self, peer: PeerId) -> None:
        """Drop everything held for a peer; its transfers fail. Unknown peers are ignored."""

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        """Start copying the peer's bytes here. TransportError when the peer is not connected."""

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        """Start copying our bytes to the peer, under a number that it has lent (0: none; peers without a fence ignore it).
        TransportError when the peer is not connected."""

    @property
    def supports_write_grants(self) -> bool:
        """Whether peers write here only under a grant id that was issued to them, and `revoke_writes` certainly ends it."""

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        """Peers may write under this number (1 to 2**64 - 1) into these blocks (ids, by group: `Region.group`) from now on, and nowhere
        else. Only where writes are fenced: LocalProtocolError elsewhere, for a number that is lent, and for blocks that there are not."""

    def revoke_writes(self, grant_id: int) -> Handle:
        """End it; `poll` yields the handle once no byte of a peer lands under this number any more (in the very next poll when nothing is
        being received under it). Unknown numbers too. Only where writes are fenced."""

    def poll(self) -> list[Completion]:
        """Make progress for a bounded time and return what has ended since the last call."""

    def cancel(self, handle: Handle) -> None:
        """Stop a transfer as soon as possible. Ended or unknown handles are ignored."""

    def poll_interval_s(self) -> float | None:
        """How soon `poll` wants to be called again: 0 for at once, None when nothing moves here."""

    def serving_interval_s(self) -> float | None:
        """How often `poll` must run while a peer may be reading our memory; None when peers need no help from us."""

    def close(self) -> None: ...
