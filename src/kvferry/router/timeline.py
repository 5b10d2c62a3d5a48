"""Timelines of requests: which events happened, and when. Read only by dashboard and log.

Pure: the caller passes `now` (local monotonic seconds). A mark is one list append, because every
request makes half a dozen marks; instances are formatted only for display. Used on one
thread.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

MAX_MARKS = 64
"""Most marks of one request. Retries are bounded elsewhere; this bounds the cost of a bug there."""
MAX_TEXT_CHARS = 400
KEPT_REQUESTS = 512
KEPT_FAILURES = 128
KEPT_ERRORS = 64


class RequestEvent(StrEnum):
    """A kind of event on a request's timeline."""

    ADMITTED = "admitted"
    """The request was admitted."""
    PREFILL_BEGAN = "prefill began"
    PREFILL_ENDED = "prefill ended"
    PREFILL_FAILED = "prefill failed"
    """The prefill leg failed or was refused; another P may be tried."""
    DECODE_BEGAN = "decode began"
    DECODE_FAILED = "decode failed"
    FIRST_TOKEN = "first token"
    """The first bytes of D's answer arrived, or P's token, if the client's answer begins with it.
    """
    CONTINUED = "continued"
    """The first bytes of D's answer arrived after the client had received P's token."""


class RequestOutcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    INVALID = "invalid"
    """The router or an engine rejected the request as invalid (4xx)."""
    REFUSED = "refused"
    """The router or an engine was overloaded (429, 503)."""
    FAILED = "failed"
    ABORTED = "aborted"
    """The stream broke off."""
    ABANDONED = "abandoned"
    """The client disconnected."""

    @property
    def is_error(self) -> bool:
        return self in _ERRORS


_ERRORS = frozenset((RequestOutcome.REFUSED, RequestOutcome.FAILED, RequestOutcome.ABORTED))


@dataclass(slots=True, eq=False)
class Timeline:
    """Events of one request. Compared by identity, because clients may reuse request ids."""

    request_id: str
    route: str
    arrived: float
    marks: list[tuple[RequestEvent, float, object]] = field(default_factory=list)
    """Events with their time and subject: the instance, or the reason of a failure."""
    conversation: str = ""
    fallback: str = ""
    """Why D computed the prompt itself; empty if P computed the prompt."""
    relayed_bytes: int = 0
    ended: float | None = None
    outcome: RequestOutcome | None = None
    status: int = 0
    error: str = ""

    def mark(self, mark: RequestEvent, now: float, about: object = None) -> None:
        """Record an event."""
        if len(self.marks) < MAX_MARKS:
            self.marks.append((mark, now, about))

    def time_of(self, mark: RequestEvent) -> float | None:
        """Time of the last event of this kind."""
        for made, at, _ in reversed(self.marks):
            if made is mark:
                return at
        return None

    def last_about(self, mark: RequestEvent) -> object:
        """Subject of the last event of this kind."""
        return next((about for made, _, about in reversed(self.marks) if made is mark), None)

    @property
    def num_retries(self) -> int:
        return sum(
            made in (RequestEvent.PREFILL_FAILED, RequestEvent.DECODE_FAILED)
            for made, _, _ in self.marks
        )


@dataclass(slots=True)
class ErrorCount:
    """One kind of error, with the number of occurrences."""

    status: int
    text: str
    count: int
    first_at: float
    last_at: float
    request_id: str
    """Request id of the last occurrence; empty if the error belongs to no request."""


@dataclass(slots=True)
class ErrorLog:
    """The most recent kinds of errors. Equal errors are counted, so that many equal errors do
    not hide other errors.
    """

    kept: int = KEPT_ERRORS
    _counts: OrderedDict[tuple[int, str], ErrorCount] = field(
        default_factory=OrderedDict, init=False
    )

    def note(self, status: int, text: str, now: float, request_id: str = "") -> None:
        text = text[:MAX_TEXT_CHARS]
        entry = self._counts.get((status, text))
        if entry is None:
            self._counts[status, text] = ErrorCount(status, text, 1, now, now, request_id)
            if len(self._counts) > self.kept:
                self._counts.popitem(last=False)
            return
        entry.count += 1
        entry.last_at = now
        entry.request_id = request_id
        self._counts.move_to_end((status, text))

    def newest_first(self) -> Iterator[ErrorCount]:
        return reversed(self._counts.values())


class RecentRequests:
    """Running requests, the last ended requests, and the last failures, which are kept longer."""

    def __init__(
        self,
        kept: int = KEPT_REQUESTS,
        kept_failures: int = KEPT_FAILURES,
        kept_errors: int = KEPT_ERRORS,
    ) -> None:
        self.errors = ErrorLog(kept_errors)
        self._live: dict[Timeline, None] = {}
        self._ended: deque[Timeline] = deque(maxlen=kept)
        self._failed: deque[Timeline] = deque(maxlen=kept_failures)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def begin(self, request_id: str, route: str, now: float) -> Timeline:
        timeline = Timeline(request_id, route, now)
        self._live[timeline] = None
        return timeline

    def end(
        self, timeline: Timeline, outcome: RequestOutcome, status: int, now: float, error: str = ""
    ) -> None:
        """Record the end of a request. A second call changes nothing."""
        # `pop` returns None for a running request, because that is the dict's value.
        if self._live.pop(timeline, False) is not None:
            return
        timeline.ended, timeline.outcome, timeline.status = now, outcome, status
        timeline.error = error[:MAX_TEXT_CHARS]
        self._ended.append(timeline)
        if outcome.is_error:
            self._failed.append(timeline)
            self.errors.note(status, error, now, timeline.request_id)

    def live(self) -> Iterator[Timeline]:
        """Running requests, oldest first."""
        return iter(self._live)

    def newest_first(self) -> Iterator[Timeline]:
        """Ended requests, newest first."""
        return reversed(self._ended)

    def failed_newest_first(self) -> Iterator[Timeline]:
        return reversed(self._failed)

    def find(self, request_id: str) -> Timeline | None:
        """The newest request with this id: a running request, else an ended request."""
        known = chain(reversed(self._live), self.newest_first(), self.failed_newest_first())
        return next((timeline for timeline in known if timeline.request_id == request_id), None)
