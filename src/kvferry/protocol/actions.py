"""What the pure side of a transfer worker wants done: imperative, plain data. The shell performs
them in order.
"""

from dataclasses import dataclass

from kvferry.protocol.handshake import TransportChoice
from kvferry.protocol.layout import Geometry
from kvferry.protocol.messages import (
    Attach,
    Confirm,
    Detach,
    HandshakeRequest,
    Heartbeat,
    OfferInfo,
    PushCancel,
    PushRegistration,
    Revoke,
)
from kvferry.protocol.planning import BlockPermutation, Segments
from kvferry.types import PeerId, RequestId

__all__ = [
    "Action",
    "CloseConnection",
    "ClosePeer",
    "CopyToHostBuffer",
    "GrantWrites",
    "OpenPeer",
    "PlaceBlocks",
    "RevokeWrites",
    "Send",
    "StartRead",
    "StartWrite",
    "StopRead",
    "StopWrite",
]


@dataclass(frozen=True, slots=True)
class Send:
    address: str
    message: (
        HandshakeRequest
        | Attach
        | Heartbeat
        | Confirm
        | Detach
        | PushRegistration
        | PushCancel
        | Revoke
    )


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Nothing more is expected from this address."""

    address: str


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Connect the first candidate transport that can, then tell `peer_opened` or
    `peer_unreachable`.
    """

    peer: PeerId
    geometry: Geometry
    offers: tuple[OfferInfo, ...]
    candidates: tuple[TransportChoice, ...]


@dataclass(frozen=True, slots=True)
class ClosePeer:
    peer: PeerId
    control_address: str


@dataclass(frozen=True, slots=True)
class StartRead:
    """Begin one read, then tell `read_ended` when it has ended."""

    request: RequestId
    peer: PeerId
    transport: str
    segments: tuple[Segments, ...]


@dataclass(frozen=True, slots=True)
class StopRead:
    request: RequestId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class GrantWrites:
    """Let a peer write into these blocks (by group) under this number."""

    transport: str
    grant_id: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RevokeWrites:
    """End what was lent, then tell `writes_revoked` when nothing of it lands any more."""

    request: RequestId
    transport: str
    grant_id: int


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Begin one write into what the peer has lent under this number, then tell `write_ended` when
    it has ended.
    """

    write: int
    peer: PeerId
    transport: str
    segments: tuple[Segments, ...]
    grant_id: int


@dataclass(frozen=True, slots=True)
class StopWrite:
    write: int


@dataclass(frozen=True, slots=True, eq=False)
class PlaceBlocks:
    """Put blocks whose bytes are confirmed into our own order and into the engine's memory, then
    tell `placed`. It is never stopped halfway.
    """

    request: RequestId
    permutations: tuple[BlockPermutation, ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    """By group: those to be copied to the engine's memory, where transports see another."""


@dataclass(frozen=True, slots=True)
class CopyToHostBuffer:
    """Copy blocks of the engine's memory to where transports see them, then tell
    `copied_to_host_buffer`. It is never stopped halfway.
    """

    request: RequestId
    blocks: tuple[tuple[int, ...], ...]
    copy: int
    """Its number: of one request there are several, and not all of them count."""


Action = (
    Send
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
