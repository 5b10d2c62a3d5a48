"""Events that the transfer worker emits; the engine, the metrics and the logs consume them.

Pure: frozen dataclasses, named in the past tense.
"""

from dataclasses import dataclass, field

from kvferry.types import LeaseEnd, RequestId


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """When a transfer reached each stage (local monotonic seconds); None if not reached."""

    tracked_at: float
    """When the request arrived."""
    attached_at: float | None = None
    """When the producer was ready to be read: connected, attached and, if needed, `Ready`."""
    allocated_at: float | None = None
    """When the engine allocated blocks."""
    began_at: float | None = None
    """When the first read was started, or write access was granted."""
    moved_at: float | None = None
    """When the last byte had arrived."""
    confirmed_at: float | None = None
    """When the producer had confirmed the bytes or, in push, could no longer write."""
    total_bytes: int = 0
    segments: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class TransferFinished:
    """The blocks of a transfer hold confirmed KV and may be used."""

    request: RequestId
    times: TransferTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """A transfer failed: its blocks hold no valid KV, and nothing writes into them any more."""

    request: RequestId
    reason: str
    times: TransferTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TransferAbandoned:
    """A transfer has failed, but a transport may still write into its blocks; `TransferFailed`
    follows when nothing can write any more.
    """

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class ReservationGranted:
    """The producer holds the lease of an optional transfer until we have read the blocks."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class ReservationRefused:
    """The KV of an optional transfer is not available; the transfer has no blocks yet."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class RetainedBlocksFetched:
    """An optional transfer has fetched this many tokens and bytes of a retained turn."""

    request: RequestId
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EvictionDeferred:
    """A reader still reads a retained turn that is to be evicted; `LeaseEnded` follows."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lease of a request has ended: no peer may read the blocks any more."""

    request: RequestId
    end: LeaseEnd


@dataclass(frozen=True, slots=True)
class BytesMoved:
    """One read or write on a transport has ended, with or without an error."""

    transport: str
    total_bytes: int
    segments: int
    """Number of copies or descriptors that the transport used."""
    planned_segments: int
    """Number of segments in the plan; higher than `segments` if the transport merged neighbours."""
    post_s: float
    transfer_s: float
    is_ok: bool
    request: RequestId | None = field(default=None, compare=False)
    """The request of ours that the bytes were read for; None if there is none."""


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A transport to a peer is connected; `reason` says why this transport was chosen."""

    engine: str
    transport: str
    reason: str


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """A handshake failed, or a connected peer was lost."""

    engine: str
    reason: str
    is_incompatible: bool = False
    """The peer's model, cache or version differs; the reason names what differs."""


@dataclass(frozen=True, slots=True)
class PrefillCompleted:
    """The producer of a push transfer has computed the whole prompt."""

    request: RequestId
    num_tokens: int
    """Number of tokens that we wanted from the producer."""
    num_left: int
    """Number of wanted tokens that had not arrived yet."""
    landed_bytes: int
    """Number of bytes that had arrived."""


@dataclass(frozen=True, slots=True)
class MessageDropped:
    """A malformed or unexpected message was dropped."""

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
