"""How errors look to clients: OpenAI's JSON shape, as a whole answer or as the last event of a stream. Pure but for aiohttp's class."""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

__all__ = ["error_body", "error_event", "error_response"]

# An engine's own refusals are passed on as they are, so ours are named like them.
_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": _type_name(status), "param": None, "code": status}})


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, body=error_body(status, message), content_type="application/json", headers=headers)


def _type_name(status: int) -> str:
    return _TYPES.get(status) or HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "") + "Error"


def error_event(status: int, message: str, tail: bytes) -> bytes:
    """A server-sent event that says why the stream ends here. `tail`: the last bytes sent before it, which may end inside an event."""
    start = b"" if not tail or tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
    return start + b"data: " + error_body(status, message) + b"\n\n"
