"""Errors in the shape that the clients of an API expect.

Pure. The router and engines make errors in OpenAI's shape, also for routes of other APIs: vLLM
checks bodies before it knows the route. Here they get the shape of the route.
"""

import msgspec

from kvferry.errors import RequestRefused
from kvferry.router.routes.table import Api
from kvferry.web.errors import error_body, error_message

__all__ = ["error_event", "shape_error"]

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _MessagesError(msgspec.Struct):
    type: str
    message: str


class _MessagesErrorBody(msgspec.Struct):
    error: _MessagesError
    type: str = "error"


class _Typed(msgspec.Struct):
    type: str


_typed_decoder = msgspec.json.Decoder(_Typed)


def shape_error(api: Api, status: int, body: bytes) -> bytes:
    """The body of an error answer in the shape of the API; unchanged if it has that shape."""
    if api is not Api.MESSAGES or status < 400 or _is_typed(body):
        return body
    return _messages_error(status, error_message(body))


def error_event(status: int, message: str, api: Api = Api.OPENAI) -> bytes:
    """Server-sent event that reports why the stream ends here.

    The bytes sent before may have ended inside an event. The leading empty lines close that event,
    and have no meaning otherwise.
    """
    body = error_body(RequestRefused(message, status=status))
    if api is Api.MESSAGES:
        return b"\n\nevent: error\ndata: " + _messages_error(status, message) + b"\n\n"
    if api is Api.RESPONSES:
        # The `error` that all clients of OpenAI look for, and the fields of this API's own event.
        own = {"type": "error", "code": str(status), "message": message, "param": None}
        fields = msgspec.json.decode(body) | own
        return b"\n\nevent: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"
    return b"\n\ndata: " + body + b"\n\n"


def _is_typed(body: bytes) -> bool:
    try:
        return _typed_decoder.decode(body).type == "error"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _messages_error(status: int, message: str) -> bytes:
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    return msgspec.json.encode(_MessagesErrorBody(_MessagesError(kind, message)))
