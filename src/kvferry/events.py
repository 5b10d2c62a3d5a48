"""Past-tense facts. The transfer worker emits them; the engine, metrics and logs are views of
them.
"""

from dataclasses import dataclass, field

from kvferry.types import LeaseEnd, RequestId

__all__ = [
    "BytesMoved",
    "Event",
    "EvictionDeferred",
    "HandshakeFailed",
    "LeaseEnded",
    "MessageDropped",
    "PeerConnected",
    "PrefillCompleted",
    "ReservationGranted",
    "ReservationRefused",
    "RetainedBlocksFetched",
    "TransferAbandoned",
    "TransferFailed",
    "TransferFinished",
    "TransferTimes",
]


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """When a pull came how far, by this machine's monotonic clock; None: it did not."""

    tracked_at: float
    attached_at: float | None = None
    """The producer was known, and told that we read."""
    allocated_at: float | None = None
    began_at: float | None = None
    """To read, or to be written to."""
    moved_at: float | None = None
    confirmed_at: float | None = None
    total_bytes: int = 0
    segments: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """The blocks hold the right bytes and may be used."""

    request: RequestId
    times: TransferTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The blocks must not be used; nothing will write into them any more."""

    request: RequestId
    reason: str
    times: TransferTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TransferAbandoned:
    """The blocks will not be used, but something may still write into them; `TransferFailed`
    follows when nothing can.
    """

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class ReservationGranted:
    """The producer keeps what an optional pull is for, and waits for us to read it."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """What an optional pull is for cannot be had. It has no blocks yet."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class RetainedBlocksFetched:
    """An optional pull has brought so much."""

    request: RequestId
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EvictionDeferred:
    """The engine wants blocks back that somebody is reading; `LeaseEnded` follows when he is
    through.
    """

    request: RequestId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """No peer may read this request's blocks any more."""

    request: RequestId
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """One transfer ended on a transport, well or not."""

    transport: str
    total_bytes: int
    segments: int
    """Copies or descriptors that were really used."""
    planned_segments: int
    """What was asked for; more, when neighbours were joined."""
    post_s: float
    transfer_s: float
    is_ok: bool
    request: RequestId | None = field(default=None, compare=False)
    """Whose blocks were read for; None: of nobody here."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    engine: str
    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    engine: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillCompleted:
    """A producer that pushes has computed all of a prompt."""

    request: RequestId
    num_tokens: int
    """That we wanted."""
    num_left: int
    """Of these: not here yet."""
    landed_bytes: int
    """What was here."""


@dataclass(frozen=True, slots=True)
class MessageDropped:
    """Something malformed or out of place came in."""

    reason: str


Event = (
    TransferFinished
    | TransferFailed
    | TransferAbandoned
    | ReservationGranted
    | ReservationRefused
    | RetainedBlocksFetched
    | LeaseEnded
    | EvictionDeferred
    | BytesMoved
    | PeerConnected
    | HandshakeFailed
    | PrefillCompleted
    | MessageDropped
)
