"""The router's own errors, as a whole answer or as the last event of a stream. Pure.

They look like an engine's, because an engine's refusals are passed on as they are.
"""

from collections.abc import Iterable

from kvferry.errors import RequestRefused
from kvferry.router.exchange import HttpResponse
from kvferry.web.errors import error_body

__all__ = ["build_error_response", "error_event"]

_JSON = ("Content-Type", "application/json; charset=utf-8")


def build_error_response(
    status: int, message: str, retry_after_s: int | None = None, headers: Iterable[tuple[str, str]] = ()
) -> HttpResponse:
    retry = [] if retry_after_s is None else [("Retry-After", str(retry_after_s))]
    return HttpResponse(status, [_JSON, *retry, *headers], error_body(RequestRefused(message, status=status)))


def error_event(status: int, message: str) -> bytes:
    """A server-sent event that says why the stream ends here. What was sent before may have ended inside an event: empty lines close it,
    and mean nothing otherwise."""
    return b"\n\ndata: " + error_body(RequestRefused(message, status=status)) + b"\n\n"
