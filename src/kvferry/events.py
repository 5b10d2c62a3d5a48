"""Past-tense facts. The ferry emits them; the engine, metrics and logs are views of them."""

from dataclasses import dataclass, field

from kvferry.types import LeaseEnd, RequestId

__all__ = [
    "BytesMoved",
    "Event",
    "HandshakeFailed",
    "KeptBlocksFetched",
    "LeaseEnded",
    "LeaseLingers",
    "MessageDropped",
    "PeerConnected",
    "PrefillCompleted",
    "PullFailed",
    "PullFinished",
    "PullGivenUp",
    "PullPromised",
    "PullRefused",
    "PullTimes",
]


@dataclass(frozen=True, slots=True)
class PullTimes:
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
    pieces: int = 0
    plane: str = ""


@dataclass(frozen=True, slots=True)
class PullFinished:
    """The blocks hold the right bytes and may be used."""

    request: RequestId
    times: PullTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The blocks must not be used; nothing will write into them any more."""

    request: RequestId
    reason: str
    times: PullTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PullGivenUp:
    """The blocks will not be used, but something may still write into them; `PullFailed` follows when nothing can."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class PullPromised:
    """The producer keeps what an optional pull is for, and waits for us to read it."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class PullRefused:
    """What an optional pull is for cannot be had. It has no blocks yet."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class KeptBlocksFetched:
    """An optional pull has brought so much."""

    request: RequestId
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LeaseLingers:
    """The engine wants blocks back that somebody is reading; `LeaseEnded` follows when he is through."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """No peer may read this request's blocks any more."""

    request: RequestId
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """One transfer ended on a plane, well or not."""

    plane: str
    total_bytes: int
    pieces: int
    """Copies or descriptors that were really used."""
    planned_pieces: int
    """What was asked for; more, when neighbours were joined."""
    post_s: float
    transfer_s: float
    is_ok: bool
    request: RequestId | None = field(default=None, compare=False)
    """Whose blocks were read for; None: of nobody here."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    engine: str
    plane: str
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
    PullFinished
    | PullFailed
    | PullGivenUp
    | PullPromised
    | PullRefused
    | KeptBlocksFetched
    | LeaseEnded
    | LeaseLingers
    | BytesMoved
    | PeerConnected
    | HandshakeFailed
    | PrefillCompleted
    | MessageDropped
)
