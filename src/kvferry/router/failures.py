"""How errors look to clients: OpenAI's JSON shape, as a whole answer or as the last event of a stream. Pure."""

import msgspec

__all__ = ["error_body", "error_event"]

_TYPES = {404: "not_found_error", 408: "timeout_error", 502: "upstream_error"}


def error_body(status: int, message: str) -> bytes:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(status: int, message: str, tail: bytes) -> bytes:
    """A server-sent event that says why the stream ends here. `tail`: the last bytes sent before it, which may end inside an event."""
    start = b"" if not tail or tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    return start + b"data: " + error_body(status, message) + b"\n\n"
