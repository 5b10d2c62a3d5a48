"""The router's own errors, as a whole answer or as the last event of a stream. Pure but for aiohttp's class.

They look like an engine's, because an engine's refusals are passed on as they are.
"""

from collections.abc import Mapping

from aiohttp.web import Response

from kvferry.errors import RequestRefused
from kvferry.web.errors import error_body
from kvferry.web.errors import error_response as refusal_response

__all__ = ["error_event", "error_response"]


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return refusal_response(RequestRefused(message, status=status), headers)


def error_event(status: int, message: str, tail: bytes) -> bytes:
    """A server-sent event that says why the stream ends here. `tail`: the last bytes sent before it, which may end inside an event."""
    start = b"" if not tail or tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    return start + b"data: " + error_body(RequestRefused(message, status=status)) + b"\n\n"
