"""Timeline of one request for the dashboard: phases with start and end, relative to arrival.

Pure. The router knows when it called which instance. Only D knows what happens until its first
token (lease, transfer, confirmation); if D reports the steps, the wait for D is split into steps.
"""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvferry.router.timeline import RequestEvent, RequestOutcome, Timeline
from kvferry.web.transfer_records import TransferRecord, transfer_phases

_SAME_MOMENT_S = 1.0
"""Records of one request are at most this far apart; records of another request with the same id
seldom are.
"""
_UNSEEN_S = 0.0005
"""Shorter than a round trip on one machine: a gap of this size is not shown."""
FormatSubject = Callable[[object], str]
"""Formats the subject of an event, for example an instance."""


class RequestPhase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of a request; times in seconds since arrival."""

    name: str
    began_s: float
    ended_s: float | None
    """None while the phase continues."""
    instance: str = ""
    detail: str = ""
    is_failed: bool = False


class RequestDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the dashboard shows about one request."""

    id: str
    route: str
    age_s: float
    """Seconds since the request arrived."""
    duration_s: float | None
    """Seconds from arrival to end; None while the request runs."""
    state: str
    status: int
    error: str
    retries: int
    fallback: str
    conversation: str
    relayed_bytes: int
    phases: list[RequestPhase]
    has_transfer: bool
    """Whether D reported when the KV was attached, read and confirmed."""


def state_of(timeline: Timeline) -> str:
    """How the request ended, or the current phase."""
    if timeline.outcome is not None:
        return timeline.outcome
    state = "queued"
    for mark, _, _ in timeline.marks:
        match mark:
            case RequestEvent.PREFILL_BEGAN:
                state = "prefill"
            case RequestEvent.DECODE_BEGAN:
                state = "decode"
            case RequestEvent.FIRST_TOKEN | RequestEvent.CONTINUED:
                state = "streaming"
            case (
                RequestEvent.ADMITTED
                | RequestEvent.PREFILL_ENDED
                | RequestEvent.PREFILL_FAILED
                | RequestEvent.DECODE_FAILED
            ):
                state = "routing" if state != "decode" else state
    return state


def view_request(
    timeline: Timeline, records: Sequence[TransferRecord], now: float, shown: FormatSubject = str
) -> RequestDetail:
    """Build the view of one request. `records`: D's transfer records for this request id."""
    record = _matching_record(timeline, records, now)
    phases = request_phases(timeline, shown)
    if record is not None:
        phases = _with_parts(phases, record, now - timeline.arrived)
    return RequestDetail(
        id=timeline.request_id,
        route=timeline.route,
        age_s=now - timeline.arrived,
        duration_s=None if timeline.ended is None else timeline.ended - timeline.arrived,
        state=state_of(timeline),
        status=timeline.status,
        error=timeline.error,
        retries=timeline.num_retries,
        fallback=timeline.fallback,
        conversation=timeline.conversation,
        relayed_bytes=timeline.relayed_bytes,
        phases=phases,
        has_transfer=record is not None,
    )


def request_phases(timeline: Timeline, shown: FormatSubject = str) -> list[RequestPhase]:
    """The phases that the router itself sees, in order. The dashboard, and the spans of a trace,
    both show these phases.
    """
    return [
        *_queued(timeline),
        *_prefills(timeline, shown),
        *_decodes(timeline, shown),
    ]


def _queued(timeline: Timeline) -> Iterator[RequestPhase]:
    first = timeline.marks[0][1] if timeline.marks else timeline.ended
    yield RequestPhase(
        name="queued", began_s=0.0, ended_s=None if first is None else first - timeline.arrived
    )


def _prefills(timeline: Timeline, shown: FormatSubject) -> Iterator[RequestPhase]:
    return _tries(
        timeline,
        "prefill",
        (RequestEvent.PREFILL_BEGAN, RequestEvent.PREFILL_FAILED, RequestEvent.PREFILL_ENDED),
        shown,
    )


def _tries(
    timeline: Timeline,
    name: str,
    marks: tuple[RequestEvent, ...],
    shown: FormatSubject,
) -> Iterator[RequestPhase]:
    """Phases of all tries of one leg. `marks`: begin, failure and ends; another begin also ends a
    try.
    """
    began, failed, *_ = marks
    made = [entry for entry in timeline.marks if entry[0] in marks]
    for index, (mark, at, instance) in enumerate(made):
        if mark is not began:
            continue
        end, ended, about = (
            made[index + 1] if index + 1 < len(made) else (None, timeline.ended, None)
        )
        yield RequestPhase(
            name=name,
            began_s=at - timeline.arrived,
            ended_s=None if ended is None else ended - timeline.arrived,
            instance="" if instance is None else shown(instance),
            detail=str(about) if end is failed and about is not None else "",
            is_failed=end is failed,
        )


def _decodes(timeline: Timeline, shown: FormatSubject) -> Iterator[RequestPhase]:
    tries = list(
        _tries(
            timeline,
            "decode",
            (
                RequestEvent.DECODE_BEGAN,
                RequestEvent.DECODE_FAILED,
                RequestEvent.FIRST_TOKEN,
                RequestEvent.CONTINUED,
            ),
            shown,
        )
    )
    yield from tries
    answered = timeline.time_of(RequestEvent.FIRST_TOKEN)
    if answered is not None:
        yield RequestPhase(
            name="streaming",
            began_s=answered - timeline.arrived,
            ended_s=None if timeline.ended is None else timeline.ended - timeline.arrived,
            instance=tries[-1].instance if tries else "",
            detail=timeline.error,
            is_failed=timeline.outcome is RequestOutcome.ABORTED,
        )


def _with_parts(
    phases: Sequence[RequestPhase], record: TransferRecord, now_s: float
) -> list[RequestPhase]:
    """Replace the last try of the decode leg by D's own steps, unless that try failed."""
    last = max((n for n, phase in enumerate(phases) if phase.name == "decode"), default=None)
    if last is None or phases[last].is_failed:
        return list(phases)
    return [*phases[:last], *_parts(phases[last], record, now_s), *phases[last + 1 :]]


def _parts(leg: RequestPhase, record: TransferRecord, now_s: float) -> Iterator[RequestPhase]:
    """Split the wait for D's first token into D's own steps, fitted into the router's times."""
    began, limit = leg.began_s, now_s if leg.ended_s is None else leg.ended_s
    # When D received the request, by the router's clock. D's record took time to arrive, and D's
    # steps were over before the router saw their result, so the time is clamped to the leg.
    received = max(began, min(now_s - record.age_s, limit - (record.first_token_s or 0.0)))
    if received - began < _UNSEEN_S:
        received = began
    if received > began:
        yield RequestPhase(name="received", began_s=began, ended_s=received, instance=leg.instance)
    for phase in transfer_phases(record):
        is_last = phase.name in ("first token", "failed")
        ended = leg.ended_s if is_last else min(received + (phase.ended_s or 0.0), limit)
        yield RequestPhase(
            name=phase.name,
            began_s=min(received + phase.began_s, limit),
            ended_s=ended,
            instance=leg.instance,
            detail=_detail(phase.name, record),
            is_failed=phase.name == "failed",
        )


def _detail(name: str, record: TransferRecord) -> str:
    match name:
        case "transfer":
            return _moved(record)
        case "failed":
            return record.failure
    return ""


def _moved(record: TransferRecord) -> str:
    return (
        f"{record.bytes:,} bytes in {record.segments:,} segments by {record.transport}"
        if record.transport
        else ""
    )


def _matching_record(
    timeline: Timeline, records: Sequence[TransferRecord], now: float
) -> TransferRecord | None:
    """D's record for this request. Clients may reuse ids, so the record whose age fits best is
    taken; if a request has several choices, a record that was read is preferred.
    """
    asked = timeline.time_of(RequestEvent.DECODE_BEGAN)
    if asked is None or not records:
        return None

    def mismatch(record: TransferRecord) -> tuple[bool, bool, float]:
        apart_s = abs(record.age_s - (now - asked))
        return apart_s > _SAME_MOMENT_S, record.read_began_s is None, apart_s

    return min(records, key=mismatch)
