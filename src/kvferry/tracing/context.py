"""The trace context of a request: the W3C headers `traceparent` and `tracestate`.

Pure, and without OpenTelemetry: the router and the engine's API read the headers even if they write
no spans. Headers come from clients, so they are untrusted: this module must never raise, and it
ignores a malformed header, as the standard demands.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

_MAX_STATE_CHARS = 512
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    r"(?P<rest>-[\x20-\x7e]{0,400})?"
)
_STATE = re.compile(r"[\x20-\x7e]*")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of another process that the spans of this process belong to."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    is_sampled: bool
    """Whether the caller records this trace; the receiver does the same."""
    state: str = ""
    """The value of `tracestate`, which is passed on unchanged."""

    def headers(self) -> list[tuple[str, str]]:
        """The headers that carry this context to another process."""
        parent = f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"
        state = [("tracestate", self.state)] if self.state else []
        return [("traceparent", parent), *state]


def read_trace_context(get: Callable[[str], str | None]) -> TraceContext | None:
    """Read the context; None if the request has none, or a malformed one. `get` returns the value
    of a header, by its name in lower case.
    """
    sent = get("traceparent")
    if sent is None:
        return None
    found = _PARENT.fullmatch(sent.strip())
    if found is None or found["version"] == "ff":
        return None
    # Later versions of the standard may add fields; version 00 has exactly four.
    if found["version"] == "00" and found["rest"] is not None:
        return None
    # The standard declares ids of zeros alone invalid.
    if not int(found["trace"], 16) or not int(found["span"], 16):
        return None
    is_sampled = bool(int(found["flags"], 16) & _SAMPLED)
    state = (get("tracestate") or "").strip()
    if len(state) > _MAX_STATE_CHARS or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(found["trace"], found["span"], is_sampled, state)
