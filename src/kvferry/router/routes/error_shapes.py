"""Errors in the shape that the clients of an API expect.

Pure. The router and the engines write errors in OpenAI's shape, on all routes: vLLM's checks of a
body do not know the API of its route. This module gives an error the shape of the route's API.
"""

import msgspec

from kvferry.errors import RequestRefused
from kvferry.router.routes.table import Api
from kvferry.web.errors import MALFORMED_JSON, error_body, error_message

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


class _TypedBody(msgspec.Struct):
    type: str


_type_decoder = msgspec.json.Decoder(_TypedBody)


def shape_error(api: Api, status: int, body: bytes) -> bytes:
    """The body of an answer; an error gets the shape of the API, unless it already has it."""
    if api is not Api.MESSAGES or status < 400 or _is_messages_error(body):
        return body
    return _messages_error(status, error_message(body))


def error_event(status: int, message: str, api: Api = Api.OPENAI) -> bytes:
    """Server-sent event that reports why the stream ends here.

    The client may have received part of another event. The empty lines at the beginning end that
    event; without such a part they have no meaning.
    """
    body = error_body(RequestRefused(message, status=status))
    if api is Api.MESSAGES:
        return b"\n\nevent: error\ndata: " + _messages_error(status, message) + b"\n\n"
    if api is Api.RESPONSES:
        # The field `error`, which all OpenAI clients look for, and the fields of this API's event.
        event = {"type": "error", "code": str(status), "message": message, "param": None}
        fields = msgspec.json.decode(body) | event
        return b"\n\nevent: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"
    return b"\n\ndata: " + body + b"\n\n"


def _is_messages_error(body: bytes) -> bool:
    try:
        return _type_decoder.decode(body).type == "error"
    except MALFORMED_JSON:
        return False


def _messages_error(status: int, message: str) -> bytes:
    default = "api_error" if status >= 500 else "invalid_request_error"
    error = _MessagesError(_ANTHROPIC_TYPES.get(status, default), message)
    return msgspec.json.encode(_MessagesErrorBody(error))
