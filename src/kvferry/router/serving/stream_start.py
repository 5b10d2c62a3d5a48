"""Waits for the event of a stream that shows whether an engine generates, failed or is stopping.

Runs on the event loop. An engine may send its response head, and events that repeat the client's
settings, long before the first token. The router waits for the event after those before it sends
the client a byte: until then another instance can be asked.
"""

import re
from dataclasses import dataclass

from kvferry.router.http.pool import UpstreamResponse
from kvferry.router.serving.event_splitter import event_data

__all__ = ["StreamStart", "is_event_stream", "peek_start"]

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


@dataclass(frozen=True, slots=True)
class StreamStart:
    """The first event of a stream that shows what the engine does; empty if there is none."""

    event: bytes = b""
    is_error: bool = False

    @property
    def data(self) -> bytes:
        return event_data(self.event)


def is_event_stream(answer: UpstreamResponse) -> bool:
    return (answer.headers.get("content-type") or "").startswith("text/event-stream")


async def peek_start(answer: UpstreamResponse, timeout_s: float) -> StreamStart:
    """Wait for the start of a stream; its bytes stay in the stream. Raises UpstreamError."""
    event = _find(await answer.peek(_is_enough, timeout_s))
    if event is None:
        return StreamStart()
    return StreamStart(event[0].lstrip(b"\n"), event["error"] is not None)


def _find(start: bytes) -> re.Match[bytes] | None:
    events = _EVENT.finditer(start)
    return next((event for event in events if event["name"] not in _BEFORE_FIRST_TOKEN), None)


def _is_enough(start: bytes) -> bool:
    return _find(start) is not None or len(start) > _MAX_START
