"""Checks what an engine answers with, and waits for the event of a stream that shows whether the
engine generates, failed or is stopping.

Runs on the event loop. An engine may send its response head, and events that repeat the client's
settings, long before the first token. The router waits for the event after those before it sends
the client a byte: until then another instance can be asked.
"""

import re
from dataclasses import dataclass

from kvferry.router.http.messages import InvalidResponse
from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.serving.event_splitter import event_data

# One event of a stream, with its name if it has one; `error` matches if the event is an error.
_EVENT = re.compile(
    rb"(?:^|\n)(?:event:[ \t]*(?P<name>[^\r\n]*)\r?\n)?"
    rb'data:[ \t]*(?P<error>\{\s*"(?:error"\s*:|type"\s*:\s*"error"))?[^\n]*\n'
)
# vLLM sends these events of responses and messages before it has computed anything.
_BEFORE_FIRST_TOKEN = (
    b"response.created",
    b"response.queued",
    b"response.in_progress",
    b"message_start",
    b"ping",
)
# A stream without an event within this many bytes counts as begun.
_MAX_START = 64 * 1024
_MAX_SPACE = 64
_SHOWN_BYTES = 100


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The first event of a stream that shows what the engine does; empty if there is none."""

    event: bytes = b""
    is_error: bool = False

    @property
    def data(self) -> bytes:
        return event_data(self.event)


def is_event_stream(answer: UpstreamResponse) -> bool:
    return _content_type(answer).partition(";")[0].strip().lower() == "text/event-stream"


def check_kind(answer: UpstreamResponse, *, is_streamed: bool) -> None:
    """Raise InvalidResponse if an engine answers a stream where JSON was requested, or the
    reverse. An answer with an error may have either form.
    """
    if answer.status == 200 and is_event_stream(answer) is not is_streamed:
        raise _unexpected(answer, "an event stream" if is_streamed else "JSON")


def check_object(answer: UpstreamResponse, body: bytes) -> None:
    """Raise InvalidResponse if the body of a successful answer cannot be a JSON object. A body
    in another encoding (gzip) is not looked at.
    """
    if answer.headers.get("content-encoding") is not None:
        return
    ends = body[:_MAX_SPACE].lstrip()[:1] + body[-_MAX_SPACE:].rstrip()[-1:]
    if ends != b"{}":
        shown = f"a body of {len(body)} bytes" if body else "an empty body"
        details = f"the body begins with {body[:_SHOWN_BYTES]!r}" if body else ""
        raise _unexpected(answer, "a JSON object", f" and {shown}", details)


def _unexpected(
    answer: UpstreamResponse, expected: str, more: str = "", details: str = ""
) -> InvalidResponse:
    kind = ascii(_content_type(answer)[:_SHOWN_BYTES]) if _content_type(answer) else "none"
    return InvalidResponse(
        f"it answered with the content type {kind}{more} where {expected} was expected; check that "
        "its address is that of an engine",
        details,
    )


def _content_type(answer: UpstreamResponse) -> str:
    return answer.headers.get("content-type") or ""


async def peek_start(answer: UpstreamResponse, timeout_s: float) -> StreamStart:
    """Wait for the start of a stream; its bytes stay in the stream. Raises UpstreamError."""
    start = await answer.peek(_is_enough, timeout_s)
    if not _is_enough(start):
        raise InvalidResponse("its event stream ended before the first event")
    event = _find(start)
    if event is None:
        return StreamStart()
    return StreamStart(event[0].lstrip(b"\n"), event["error"] is not None)


def _find(start: bytes) -> re.Match[bytes] | None:
    events = _EVENT.finditer(start)
    return next((event for event in events if event["name"] not in _BEFORE_FIRST_TOKEN), None)


def _is_enough(start: bytes) -> bool:
    return _find(start) is not None or len(start) > _MAX_START
