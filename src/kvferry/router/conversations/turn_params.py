"""Extracts D's `kv_transfer_params` from D's answer: the router uses them, the client does not.

Pure. The embedded engine sends the parameters in a separate event before `[DONE]`; in a
complete answer the parameters are one key. Everything else is passed on unchanged.
"""

import re

import msgspec

__all__ = ["TurnParamsFilter", "take_turn_params"]

MAX_BUFFERED_BYTES = 4 * 1024 * 1024
"""A longer event cannot contain the parameters and is passed on in parts."""

_Fields = dict[str, msgspec.Raw]
_decoder: msgspec.json.Decoder[_Fields] = msgspec.json.Decoder(_Fields)
_KEY = "kv_transfer_params"
# Inside a JSON string the quotes would be escaped, so this text is always a key.
_MARK = b'"kv_transfer_params":'
_MARK_SPACED = b'"kv_transfer_params" :'
_EVENT_END = re.compile(rb"(\r?\n\r?\n)")


class TurnParamsFilter:
    """Filter between D's stream and the client: call `feed` with each segment, and b"" at the end.
    `params` holds the parameters found.
    """

    __slots__ = ("_rest", "params")

    def __init__(self) -> None:
        self._rest = b""
        self.params: bytes | None = None

    def feed(self, segment: bytes) -> bytes:
        """Return the bytes for the client; only an incomplete event is held back."""
        if not segment:
            rest, self._rest = self._rest, b""
            return self._strip_events(rest)
        text = self._rest + segment
        end = max(_after_last(text, b"\n\n"), _after_last(text, b"\r\n\r\n"))
        if not end and len(text) > MAX_BUFFERED_BYTES:
            end = len(text)
        whole, self._rest = text[:end], text[end:]
        return self._strip_events(whole)

    def _strip_events(self, events: bytes) -> bytes:
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
        if bytes(fields.get("choices", b"")) == b"[]" and "usage" not in fields:
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
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    raw = fields.pop(_KEY, None)
    if raw is None:
        return None
    params = bytes(raw)
    return (params if params.startswith(b"{") else None), fields
