"""The timeline of a request's KV transfer, as the fetching engine serves it at `GET
/kvferry/transfers`. Plain data.

All times are durations in seconds since the engine received the request. Clocks of two hosts cannot
be compared, so no point in time crosses the wire.
"""

from collections.abc import Sequence

import msgspec

__all__ = ["TransferRecord", "TransferRecords", "read_transfer_records"]

MAX_RECORDS = 1024


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request (one choice of a client request) whose KV came, or should have come, from a peer.
    Steps that have not happened are None.
    """

    request_id: str
    """The engine's request id, which begins with the id that the client sent."""
    age_s: float
    """The time since the engine received the request."""
    attached_s: float | None = None
    """When the producer was known and the consumer had attached to its lease."""
    allocated_s: float | None = None
    """When the engine had allocated blocks for the request."""
    read_began_s: float | None = None
    read_ended_s: float | None = None
    confirmed_s: float | None = None
    scheduled_s: float | None = None
    """When the first step after the transfer began."""
    first_token_s: float | None = None
    bytes: int = 0
    segments: int = 0
    """The number of copies or descriptors."""
    transport: str = ""
    failure: str = ""


class TransferRecords(msgspec.Struct, frozen=True):
    """The body of `GET /kvferry/transfers`."""

    transfers: list[TransferRecord]
    """The records, newest first."""


_decode = msgspec.json.Decoder(TransferRecords).decode


def read_transfer_records(body: bytes) -> Sequence[TransferRecord]:
    """The records in an instance's answer; empty if the body is not a valid answer."""
    try:
        return _decode(body).transfers[:MAX_RECORDS]
    except (msgspec.MsgspecError, RecursionError):
        return ()
