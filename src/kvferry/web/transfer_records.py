"""When a request's KV was attached, read and confirmed, as the engine that fetched it tells whoever
shows it (`GET /kvferry/transfers`).

Durations since that engine got the request, in seconds. Clocks are nobody else's business, so no
point in time crosses the wire.
"""

from collections.abc import Sequence

import msgspec

__all__ = ["TransferRecord", "TransferRecords", "read_transfer_records"]

MAX_RECORDS = 1024


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request (one choice of it) whose KV came, or was to come, from a peer. What has not
    happened is None.
    """

    request_id: str
    """The engine's own, which begins with the one that its client sent."""
    age_s: float
    """Since the engine got it."""
    attached_s: float | None = None
    """The producer was known, and told that its lease is wanted."""
    allocated_s: float | None = None
    """There were blocks for it."""
    read_began_s: float | None = None
    read_ended_s: float | None = None
    confirmed_s: float | None = None
    scheduled_s: float | None = None
    """Its first step after that began."""
    first_token_s: float | None = None
    bytes: int = 0
    segments: int = 0
    """Copies or descriptors."""
    transport: str = ""
    failure: str = ""


class TransferRecords(msgspec.Struct, frozen=True):
    transfers: list[TransferRecord]
    """Newest first."""


_decode = msgspec.json.Decoder(TransferRecords).decode


def read_transfer_records(body: bytes) -> Sequence[TransferRecord]:
    """What an instance answered; nothing when it is no such answer."""
    try:
        return _decode(body).transfers[:MAX_RECORDS]
    except (msgspec.MsgspecError, RecursionError):
        return ()
