"""What the pure side of a ferry wants done: imperative, plain data. The shell performs them in order."""

from dataclasses import dataclass

from kvferry.protocol.geometry import Geometry
from kvferry.protocol.handshake import PlaneChoice
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
from kvferry.protocol.placement import Placement
from kvferry.protocol.planning import Pieces
from kvferry.types import PeerId, RequestId

__all__ = [
    "Action",
    "ClosePeer",
    "Expose",
    "HangUp",
    "Lend",
    "OpenPeer",
    "Place",
    "Send",
    "StartRead",
    "StartWrite",
    "StopRead",
    "StopWrite",
    "TakeBack",
]


@dataclass(frozen=True, slots=True)
class Send:
    address: str
    message: HandshakeRequest | Attach | Heartbeat | Confirm | Detach | PushRegistration | PushCancel | Revoke


@dataclass(frozen=True, slots=True)
class HangUp:
    """Nothing more is expected from this address."""

    address: str


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Connect the first candidate plane that can, then tell `peer_opened` or `peer_unreachable`."""

    peer: PeerId
    geometry: Geometry
    offers: tuple[OfferInfo, ...]
    candidates: tuple[PlaneChoice, ...]


@dataclass(frozen=True, slots=True)
class ClosePeer:
    peer: PeerId
    control_address: str


@dataclass(frozen=True, slots=True)
class StartRead:
    """Begin one read, then tell `read_ended` when it has ended."""

    request: RequestId
    peer: PeerId
    plane: str
    pieces: tuple[Pieces, ...]


@dataclass(frozen=True, slots=True)
class StopRead:
    request: RequestId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Lend:
    """Let a peer write into these blocks (by group) under this number."""

    plane: str
    number: int
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class TakeBack:
    """End what was lent, then tell `taken_back` when nothing of it lands any more."""

    request: RequestId
    plane: str
    number: int


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Begin one write into what the peer has lent under this number, then tell `write_ended` when it has ended."""

    write: int
    peer: PeerId
    plane: str
    pieces: tuple[Pieces, ...]
    number: int


@dataclass(frozen=True, slots=True)
class StopWrite:
    write: int


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Put blocks whose bytes are confirmed into our own order and into the engine's memory, then tell `placed`. It is never stopped
    halfway."""

    request: RequestId
    placements: tuple[Placement, ...]
    blocks: tuple[tuple[int, ...], ...] = ()
    """By group: those to be copied to the engine's memory, where planes see another."""


@dataclass(frozen=True, slots=True)
class Expose:
    """Copy blocks of the engine's memory to where planes see them, then tell `exposed`. It is never stopped halfway."""

    request: RequestId
    blocks: tuple[tuple[int, ...], ...]
    copy: int
    """Its number: of one request there are several, and not all of them count."""


Action = Send | HangUp | OpenPeer | ClosePeer | StartRead | StopRead | Lend | TakeBack | StartWrite | StopWrite | Place | Expose
