"""The timeline of a request's KV transfer, as the fetching engine serves it at `GET
/kvferry/transfers`, and its phases. Plain data, and pure.

All times are durations in seconds since the engine received the request. Clocks of two hosts cannot
be compared, so no point in time crosses the wire.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvferry.events import TransferTimes

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


def make_transfer_record(
    request_id: str,
    arrived: float,
    now: float,
    times: Sequence[TransferTimes],
    *,
    scheduled: float | None = None,
    first_token: float | None = None,
    failure: str = "",
) -> TransferRecord:
    """Make the record of one request from the times of its transfer on each rank. All times are
    local monotonic seconds.
    """

    def since(moments: Iterable[float | None]) -> float | None:
        known = [moment for moment in moments if moment is not None]
        return max(0.0, max(known) - arrived) if known else None

    began = [part.began_at for part in times if part.began_at is not None]
    return TransferRecord(
        request_id=request_id,
        age_s=now - arrived,
        attached_s=since(part.attached_at for part in times),
        allocated_s=since(part.allocated_at for part in times),
        read_began_s=since([min(began)] if began else []),
        read_ended_s=since(part.moved_at for part in times),
        confirmed_s=since(part.confirmed_at for part in times),
        scheduled_s=since([scheduled]),
        first_token_s=since([first_token]),
        bytes=sum(part.total_bytes for part in times),
        segments=sum(part.segments for part in times),
        transport=next((part.transport for part in times if part.transport), ""),
        failure=failure,
    )


class TransferPhase(msgspec.Struct, frozen=True):
    """One phase of a transfer; times in seconds since the engine received the request."""

    name: str
    began_s: float
    ended_s: float | None
    """None while the phase continues, and for `failed`, whose end the record does not have."""


def transfer_phases(record: TransferRecord) -> Iterator[TransferPhase]:
    """The phases from the arrival of the request until its first token, each of which begins when
    the one before ends. The dashboard and the spans of a trace both show these phases.
    """
    ends = (
        ("lease", record.attached_s),
        ("blocks", record.read_began_s),
        ("transfer", record.read_ended_s),
        ("confirm", record.confirmed_s),
        ("scheduled", record.scheduled_s),
    )
    began_s = 0.0
    for name, ended_s in ends:
        # The times of several ranks may overlap.
        if ended_s is not None and ended_s >= began_s:
            yield TransferPhase(name, began_s, ended_s)
            began_s = ended_s
    if record.failure:
        yield TransferPhase("failed", began_s, None)
    else:
        yield TransferPhase("first token", began_s, record.first_token_s)
