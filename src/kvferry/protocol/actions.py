"""Actions that the pure protocol code asks the transfer worker to perform.

Consumer, producer and push writer return actions as plain data; the transfer worker's thread
performs the actions in order. An action that takes time ends with a call back into the protocol
code, named in the docstring of the action. Pure.
"""

from dataclasses import dataclass

from kvferry.protocol.handshake import TransportChoice
from kvferry.protocol.messages import (
    HandshakeRequest,
    PushOffer,
    RankReply,
    ToProducer,
    TransportOffer,
)
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.plan import BlockPermutation, Segments
from kvferry.types import BlockIds, PeerId, RequestId, Route


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to an address, over a new connection if there is none."""

    address: str
    message: HandshakeRequest | ToProducer


ReplyMessage = RankReply | PushOffer
"""Messages from a producer to a consumer."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a message to a consumer, over the connection that the consumer has opened."""

    route: Route
    message: ReplyMessage


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Close the connection to an address from which no more messages are expected."""

    address: str


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Connect to a peer with the first candidate transport that succeeds.

    The worker then calls `peer_opened` or `peer_unreachable`.
    """

    peer: PeerId
    geometry: Geometry
    offers: tuple[TransportOffer, ...]
    candidates: tuple[TransportChoice, ...]


@dataclass(frozen=True, slots=True)
class ClosePeer:
    """Disconnect every transport from a peer and close the peer's control connection."""

    peer: PeerId
    control_address: str


@dataclass(frozen=True, slots=True)
class StartRead:
    """Start one read; the worker calls `read_ended` when the read has ended."""

    request: RequestId
    peer: PeerId
    transport: str
    segments: tuple[Segments, ...]


@dataclass(frozen=True, slots=True)
class StopRead:
    """Cancel a read; `read_ended` still follows."""

    request: RequestId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class GrantWrites:
    """Let the transport admit a peer's writes into these blocks (by group) under this grant id."""

    transport: str
    grant_id: int
    blocks: BlockIds


@dataclass(frozen=True, slots=True)
class RevokeWrites:
    """Revoke a write grant at the transport.

    The worker calls `writes_revoked` when no write under the grant can land any more.
    """

    request: RequestId
    transport: str
    grant_id: int


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Start one write into a peer's blocks under the peer's write grant.

    The worker calls `write_ended` when the write has ended.
    """

    write: int
    """Number of the write, unique within this worker."""
    peer: PeerId
    transport: str
    segments: tuple[Segments, ...]
    grant_id: int


@dataclass(frozen=True, slots=True)
class StopWrite:
    """Cancel a write; `write_ended` still follows."""

    write: int


@dataclass(frozen=True, slots=True, eq=False)
class PlaceBlocks:
    """Rearrange confirmed blocks into our own order and copy the blocks to the engine's memory.

    The worker calls `placed` at the end. Placing is never stopped halfway.
    """

    request: RequestId
    permutations: tuple[BlockPermutation, ...]
    blocks: BlockIds = ()
    """By group: blocks to copy from the host buffer to the engine's memory; empty without a host
    buffer.
    """


@dataclass(frozen=True, slots=True)
class CopyToHostBuffer:
    """Copy blocks from the engine's memory to the host buffer.

    The worker calls `copied_to_host_buffer` at the end. The copy is never stopped halfway.
    """

    request: RequestId
    blocks: BlockIds
    copy: int
    """Number of the copy. A request may have several copies, and the copies of a withdrawn lease
    do not count.
    """


Action = (
    Send
    | Reply
    | CloseConnection
    | OpenPeer
    | ClosePeer
    | StartRead
    | StopRead
    | GrantWrites
    | RevokeWrites
    | StartWrite
    | StopWrite
    | PlaceBlocks
    | CopyToHostBuffer
)
