"""OpenAI-style error bodies: every HTTP answer that is not a success has this shape.

Pure. The engine and the router share the shape; each builds its own HTTP answers around it.
"""

from http import HTTPStatus

import msgspec

from kvferry.errors import RequestRefused

MALFORMED_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for JSON of another process: bad syntax or types, bad UTF-8, deep nesting."""


_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The contents of an error body."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """An error body in OpenAI's shape."""

    error: ErrorDetail


class _Message(msgspec.Struct):
    message: str


class _AnyError(msgspec.Struct):
    error: _Message


_error_decoder = msgspec.json.Decoder(_AnyError)
_MAX_MESSAGE_CHARS = 1000


def error_body(refusal: RequestRefused) -> bytes:
    detail = ErrorDetail(
        message=refusal.message,
        type=_type_name(refusal.status),
        param=refusal.param,
        code=refusal.status,
    )
    return msgspec.json.encode(ErrorBody(detail))


def error_message(body: bytes) -> str:
    """The message in an engine's error body or error event; the start of the text if it has another
    shape.
    """
    # An event ends with an empty line, and further events may follow.
    first = body[body.find(b"{") :].replace(b"\r\n", b"\n").partition(b"\n\n")[0]
    try:
        message = _error_decoder.decode(first).error.message
    except MALFORMED_JSON:
        message = ""
    return (message or body.decode(errors="replace").strip())[:_MAX_MESSAGE_CHARS]


def _type_name(status: int) -> str:
    known = _TYPES.get(status)
    if known is not None:
        return known
    try:
        return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "") + "Error"
    except ValueError:
        return "BadRequestError" if status < 500 else "InternalServerError"
