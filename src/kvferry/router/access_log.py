"""The access log: one line per request with its ids, instances, outcome, tokens, bytes and times.

A line must never contain a prompt, an answer, a header or a key. `AnswerFacts` collects what only
the engines' answers say: their request ids and the number of tokens. The router makes one only
while the access log is on; otherwise it relays answers unread. Runs on the event loop.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvferry.config.fields import Natural
from kvferry.router.fleet.instances import Instance
from kvferry.router.timeline import RequestEvent, Timeline
from kvferry.web.errors import MALFORMED_JSON

_log = logging.getLogger("kvferry.router.access")

MAX_IDS = 16
"""Most request ids of each role in one line; a request may have 256 prompts with an id each."""
MAX_ID_CHARS = 128
_TAIL_BYTES = 4096
"""How much of the end of a stream is searched for the event with the usage."""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Natural | None = None
    completion_tokens: Natural | None = None


class _Answer(msgspec.Struct, gc=False):
    id: str | None = None
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)
_text_decoder = msgspec.json.Decoder(str)


@dataclass(slots=True)
class AnswerFacts:
    """What the engines' answers say about one client request, which may have several prompts."""

    prefill_ids: list[str] = field(default_factory=list)
    """The ids that prefill instances gave to the request."""
    decode_ids: list[str] = field(default_factory=list)
    _prefill_usage: dict[str, _Usage] = field(default_factory=dict)
    """By the request id of the leg: each prompt of a client request has its own."""
    _decode_usage: dict[str, _Usage] = field(default_factory=dict)
    _num_first_tokens: int = 0

    def note_first_token(self) -> None:
        """Count an answer that begins with P's token, which D counts as part of the prompt."""
        self._num_first_tokens += 1

    def note_prefill(self, request_id: str, body: bytes) -> None:
        """Read P's answer. `request_id`: that of the leg."""
        _note(request_id, body, self.prefill_ids, self._prefill_usage)

    def note_decode(self, request_id: str, body: bytes) -> None:
        """Read D's complete answer, or the data of one event of its stream."""
        _note(request_id, body, self.decode_ids, self._decode_usage)

    def reading_filter(
        self, request_id: str, next_filter: Callable[[bytes], bytes] | None
    ) -> Callable[[bytes], bytes]:
        """A filter for `RequestContext.relay` that reads D's stream and changes nothing."""
        return _StreamReader(self, request_id, next_filter).feed

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts, as P counted them, else D; None if no count is known."""
        return _total(
            usage.prompt_tokens for usage in {**self._decode_usage, **self._prefill_usage}.values()
        )

    @property
    def completion_tokens(self) -> int | None:
        """Tokens of all answers; None if no count is known."""
        total = _total(usage.completion_tokens for usage in self._decode_usage.values())
        if total is None and self.decode_ids:
            return None  # D generated tokens, but did not say how many
        return _total([total, self._num_first_tokens or None])


class _StreamReader:
    """Reads the first segment of a stream, which has the id, and the last bytes when the stream has
    ended, which may have the usage.
    """

    def __init__(
        self, facts: AnswerFacts, request_id: str, next_filter: Callable[[bytes], bytes] | None
    ) -> None:
        self._facts = facts
        self._request_id = request_id
        self._next_filter = next_filter
        self._tail = b""

    def feed(self, segment: bytes) -> bytes:
        """Take a segment of the stream; b"" ends the stream."""
        is_first, is_end = not self._tail, not segment
        if is_first or is_end:
            self._read_events(self._tail if is_end else segment)
        self._tail = (self._tail + segment)[-_TAIL_BYTES:]
        return segment if self._next_filter is None else self._next_filter(segment)

    def _read_events(self, events: bytes) -> None:
        for line in events.split(b"\n"):
            if line.startswith(b"data:"):
                self._facts.note_decode(self._request_id, line.removeprefix(b"data:"))


def _note(request_id: str, body: bytes, ids: list[str], usage: dict[str, _Usage]) -> None:
    try:
        answer = _decoder.decode(body)
    except MALFORMED_JSON:
        return
    if answer.id is not None and len(ids) < MAX_IDS:
        shown_id = answer.id[:MAX_ID_CHARS]
        if shown_id not in ids:
            ids.append(shown_id)
    if answer.usage is not None:
        usage[request_id] = answer.usage


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


# -- lines --


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Writes the lines, if the access log is on."""

    is_on: bool

    def new_facts(self) -> AnswerFacts | None:
        """The collector for one client request; None if the access log is off."""
        return AnswerFacts() if self.is_on else None

    def note_generation(
        self,
        timeline: Timeline,
        facts: AnswerFacts | None,
        model: msgspec.Raw | None,
        **more: object,
    ) -> None:
        """Log a generation that has ended. `model`: the field of the client's request; `more`:
        fields that neither the timeline nor the answers have.
        """
        if facts is None:
            return
        _log.info(
            "request",
            extra={
                "request": timeline.request_id,
                "conversation": timeline.conversation[:MAX_ID_CHARS],
                "prefill_request": facts.prefill_ids or None,
                "decode_request": facts.decode_ids or None,
                "route": timeline.route,
                "model": _model_name(model),
                "status": timeline.status,
                "outcome": str(timeline.outcome),
                "prefill": _url(timeline.last_about(RequestEvent.PREFILL_BEGAN)),
                "decode": _url(timeline.last_about(RequestEvent.DECODE_BEGAN)),
                "retries": timeline.num_retries,
                "fallback": timeline.fallback,
                "error": timeline.error,
                "prompt_tokens": facts.prompt_tokens,
                "completion_tokens": facts.completion_tokens,
                "sent_bytes": timeline.relayed_bytes,
                **phase_times(timeline),
                **more,
            },
        )

    def note_page(self, request_id: str, method: str, path: str, status: int) -> None:
        """Log a request for a page of the router, or one that the router refused. Load balancers
        and Prometheus ask for pages every few seconds, so pages that succeed are logged at DEBUG.
        """
        if self.is_on:
            _log.log(
                logging.DEBUG if status < 400 else logging.INFO,
                "request",
                extra={
                    "request": request_id,
                    "method": method,
                    "route": path[:MAX_ID_CHARS],
                    "status": status,
                },
            )


def phase_times(timeline: Timeline) -> dict[str, float | None]:
    """Seconds of each phase; None if the request had no such phase.

    With retries the times are those of the last try, with several prompts those of the last prompt.
    """
    # The first mark of a request is its admission. A request that was never admitted has no mark.
    admitted = timeline.marks[0][1] if timeline.marks else timeline.ended
    prefill_began = timeline.time_of(RequestEvent.PREFILL_BEGAN)
    prefill_ended = timeline.time_of(RequestEvent.PREFILL_ENDED)
    first_token = timeline.time_of(RequestEvent.FIRST_TOKEN)
    return {
        "queue_s": _duration_s(timeline.arrived, admitted),
        "prefill_s": _duration_s(prefill_began, prefill_ended),
        "handover_s": _duration_s(prefill_ended, first_token),
        "first_token_s": _duration_s(timeline.arrived, first_token),
        "total_s": _duration_s(timeline.arrived, timeline.ended),
    }


def _duration_s(began: float | None, ended: float | None) -> float | None:
    # The last marks of two kinds may belong to different prompts, and then be in the wrong order.
    return None if began is None or ended is None or ended < began else round(ended - began, 6)


def _url(about: object) -> str:
    return about.url if isinstance(about, Instance) else ""


def _model_name(model: msgspec.Raw | None) -> str:
    try:
        return "" if model is None else _text_decoder.decode(model)[:MAX_ID_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
