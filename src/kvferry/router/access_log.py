"""The access log: one line per request with its ids, instances, outcome, tokens, bytes and times.

A line never contains a prompt, an answer, a header or a key. `AnswerFacts` collects what only the
engines' answers say, and exists only while the access log is on: without it, answers are relayed
unread. Runs on the event loop.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvferry.router.fleet.instances import Instance
from kvferry.router.timeline import RequestEvent, Timeline

__all__ = ["AccessLog", "AnswerFacts", "phase_times"]

_log = logging.getLogger("kvferry.router.access")

MAX_IDS = 16
"""Most request ids of each role in one line; a request may have 256 prompts."""
MAX_ID_CHARS = 128
_TAIL_BYTES = 4096
"""So much of the end of a stream is searched for the event with the usage."""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, gc=False):
    id: str | None = None
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)
_name_decoder = msgspec.json.Decoder(str)


@dataclass(slots=True)
class AnswerFacts:
    """What the engines' answers say about one client request, which may have several prompts."""

    prefill_ids: list[str] = field(default_factory=list)
    """The ids that prefill instances gave to the request."""
    decode_ids: list[str] = field(default_factory=list)
    _prefill_usage: dict[str, _Usage] = field(default_factory=dict)
    """By request id of the leg: each prompt of a request has its own."""
    _decode_usage: dict[str, _Usage] = field(default_factory=dict)
    _num_first_tokens: int = 0

    def note_first_token(self) -> None:
        """The answer begins with P's token, which D counts as part of the prompt."""
        self._num_first_tokens += 1

    def note_prefill(self, request_id: str, body: bytes) -> None:
        """Read P's answer."""
        self._note(request_id, _read(body), self.prefill_ids, self._prefill_usage)

    def note_decode(self, request_id: str, body: bytes) -> None:
        """Read D's complete answer."""
        self._note(request_id, _read(body), self.decode_ids, self._decode_usage)

    def watched(
        self, request_id: str, then: Callable[[bytes], bytes] | None
    ) -> Callable[[bytes], bytes]:
        """A filter that reads D's stream and changes nothing; `then` is the next filter."""
        return _StreamReader(self, request_id, then).feed

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts, as P counted them, else D; None if no count is known."""
        return _total(
            usage.prompt_tokens for usage in {**self._decode_usage, **self._prefill_usage}.values()
        )

    @property
    def completion_tokens(self) -> int | None:
        counts = [usage.completion_tokens for usage in self._decode_usage.values()]
        total = _total(counts)
        if total is None and self.decode_ids:
            return None
        return _total([total, self._num_first_tokens or None])

    def note_events(self, request_id: str, events: bytes) -> None:
        """Read events of D's stream: the first has the id, the last may have the usage."""
        for line in events.split(b"\n"):
            if line.startswith(b"data:"):
                self.note_decode(request_id, line.removeprefix(b"data:"))

    def _note(
        self, request_id: str, answer: "_Answer", ids: list[str], usage: dict[str, "_Usage"]
    ) -> None:
        if answer.id is not None and len(ids) < MAX_IDS:
            name = answer.id[:MAX_ID_CHARS]
            if name not in ids:
                ids.append(name)
        if answer.usage is not None:
            usage[request_id] = answer.usage


class _StreamReader:
    """Reads the first segment of a stream, and the last bytes when the stream has ended."""

    def __init__(
        self, facts: AnswerFacts, request_id: str, then: Callable[[bytes], bytes] | None
    ) -> None:
        self._facts = facts
        self._request_id = request_id
        self._then = then
        self._tail = b""

    def feed(self, segment: bytes) -> bytes:
        if not self._tail or not segment:
            self._facts.note_events(self._request_id, segment or self._tail)
        self._tail = (self._tail + segment)[-_TAIL_BYTES:]
        return segment if self._then is None else self._then(segment)


def _read(body: bytes) -> _Answer:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Answer()


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


# -- lines --


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Writes the lines, if the access log is on."""

    is_on: bool

    def new_facts(self) -> AnswerFacts | None:
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
        """Log a request that is no generation, or was refused. Load balancers and Prometheus ask
        for pages every few seconds: those that succeed are shown at level DEBUG.
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
    admitted = timeline.marks[0][1] if timeline.marks else timeline.ended
    began = timeline.time_of(RequestEvent.PREFILL_BEGAN)
    ended = timeline.time_of(RequestEvent.PREFILL_ENDED)
    first = timeline.time_of(RequestEvent.FIRST_TOKEN)
    return {
        "queue_s": _between(timeline.arrived, admitted),
        "prefill_s": _between(began, ended),
        "handover_s": _between(ended, first),
        "first_token_s": _between(timeline.arrived, first),
        "total_s": _between(timeline.arrived, timeline.ended),
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None or end < start else round(end - start, 6)


def _url(about: object) -> str:
    return about.url if isinstance(about, Instance) else ""


def _model_name(model: msgspec.Raw | None) -> str:
    try:
        return "" if model is None else _name_decoder.decode(model)[:MAX_ID_CHARS]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
