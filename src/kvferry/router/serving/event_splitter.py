"""Splits a stream of server-sent events. Pure."""

import re
from collections.abc import Callable, Iterable

# A CR before the first line feed stays in the event, where it does no harm: a pattern that starts
# with a fixed byte is searched many times as fast as one that starts with an optional byte.
_EVENT_END = re.compile(rb"\n\r?\n")
_CUT_END_BYTES = 2
"""Most bytes of an event's end that can have arrived without the rest of the end."""


class EventSplitter:
    """Splits a stream of server-sent events that arrives in segments of any length.

    The bytes of an incomplete event are searched once and not again with every segment: the first
    event may have megabytes (`echo` with `logprobs`), and the event loop serves all clients.
    """

    def __init__(
        self, find_ends: Callable[[bytearray, int], Iterable[re.Match[bytes]]] = _EVENT_END.finditer
    ) -> None:
        """`find_ends` finds the ends of events from an offset on."""
        self._find_ends = find_ends
        self._incomplete = bytearray()

    @property
    def num_incomplete(self) -> int:
        """Bytes of the event that has not arrived completely."""
        return len(self._incomplete)

    def feed(self, segment: bytes) -> list[bytes]:
        """The events that the segment completes."""
        searched = max(0, len(self._incomplete) - _CUT_END_BYTES)
        self._incomplete += segment
        events, start = [], 0
        for end in self._find_ends(self._incomplete, searched):
            events.append(bytes(self._incomplete[start : end.start()]))
            start = end.end()
        del self._incomplete[:start]
        return events

    def finish(self) -> list[bytes]:
        """The last event, if the stream ended without the empty line after it."""
        return [bytes(self._incomplete)] if self._incomplete.strip() else []


def event_data(event: bytes) -> bytes:
    """The data of an event; empty for a comment, which only keeps a connection alive."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(line.removeprefix(b"data:") for line in lines).strip()
