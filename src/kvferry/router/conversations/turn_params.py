"""Extracts D's `kv_transfer_params` from D's answer: the router uses them, the client does not.

Pure. The embedded engine sends the parameters in a separate event before `[DONE]`; in a
complete answer the parameters are one key. Everything else is passed on unchanged.
"""

import re
from collections.abc import Callable

import msgspec

from kvferry.web.errors import MALFORMED_JSON

MAX_BUFFERED_BYTES = 4 * 1024 * 1024
"""A longer event cannot contain the parameters and is passed on in parts."""

_Fields = dict[str, msgspec.Raw]
_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_KEY = "kv_transfer_params"
# Inside a JSON string the quotes would be escaped, so this text is always a key.
_MARK = b'"kv_transfer_params":'
_MARK_SPACED = b'"kv_transfer_params" :'
# vLLM 0.33 ends almost every event of a stream with this null. It is removed without parsing the
# event: the brace before the empty line closes the event's outermost object.
_NULL_AT_END, _OBJECT_END = b',"kv_transfer_params":null}\n\n', b"}\n\n"
_EVENT_END = re.compile(rb"(\r?\n\r?\n)")
# Inside a JSON string a line end would be escaped, so this text is always the last event.
_DONE = re.compile(rb"(?:^|\n)data: ?\[DONE\]")


class TurnParamsFilter:
    """Filter between D's stream and the client: call `feed` with each segment, and b"" at the end.
    `params` holds the parameters found.

    `on_end` is called once, with the parameters, before `feed` returns the stream's last event. A
    client that has read this event sends its next turn at once, although the end of the HTTP body
    may reach the router later.
    """

    __slots__ = ("_is_ended", "_on_end", "_rest", "params")

    def __init__(self, on_end: Callable[[bytes | None], None] = lambda params: None) -> None:
        self._rest = b""
        self._on_end = on_end
        self._is_ended = False
        self.params: bytes | None = None

    def feed(self, segment: bytes) -> bytes:
        """Return the bytes for the client; only an incomplete event is held back."""
        events = self._strip_events(self._take_events(segment))
        # The pattern alone takes longer than the rest of this method.
        is_last = not segment or (b"[DONE]" in events and _DONE.search(events) is not None)
        if is_last and not self._is_ended:
            self._is_ended = True
            self._on_end(self.params)
        return events

    def _take_events(self, segment: bytes) -> bytes:
        if not segment:
            rest, self._rest = self._rest, b""
            return rest
        text = self._rest + segment
        end = max(_after_last(text, b"\n\n"), _after_last(text, b"\r\n\r\n"))
        if not end and len(text) > MAX_BUFFERED_BYTES:
            end = len(text)
        whole, self._rest = text[:end], text[end:]
        return whole

    def _strip_events(self, events: bytes) -> bytes:
        events = events.replace(_NULL_AT_END, _OBJECT_END)
        if _MARK not in events and _MARK_SPACED not in events:
            return events
        parts = _EVENT_END.split(events)
        # parts: event, end, event, end, …, and the text after the last end.
        return b"".join(
            self._strip(event, end)
            for event, end in zip(parts[::2], [*parts[1::2], b""], strict=True)
        )

    def _strip(self, event: bytes, end: bytes) -> bytes:
        found = _take(event.removeprefix(b"data:")) if event.startswith(b"data:") else None
        if found is None:
            return event + end
        params, fields = found
        self.params = params or self.params
        # An event made only for the parameters is dropped completely.
        has_choices = bytes(fields.get("choices", b"")) != b"[]"
        if params is not None and not has_choices and "usage" not in fields:
            return b""
        return b"data: " + msgspec.json.encode(fields) + end


def _after_last(text: bytes, mark: bytes) -> int:
    found = text.rfind(mark)
    return found + len(mark) if found >= 0 else 0


def take_turn_params(body: bytes) -> tuple[bytes | None, bytes]:
    """Split a complete answer into the parameters and the answer without them. An answer that is
    not a JSON object is returned unchanged.
    """
    found = _take(body)
    return (None, body) if found is None else (found[0], msgspec.json.encode(found[1]))


def _take(text: bytes) -> tuple[bytes | None, _Fields] | None:
    try:
        fields = _decoder.decode(text)
    except MALFORMED_JSON:
        return None
    raw = fields.pop(_KEY, None)
    if raw is None:
        return None
    params = bytes(raw)
    return (params if params.startswith(b"{") else None), fields
