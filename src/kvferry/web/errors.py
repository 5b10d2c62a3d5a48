"""OpenAI-style error bodies: every HTTP answer that is not a success has this shape.

Pure. The engine and the router share the shape; each builds its own HTTP answers around it.
"""

import re
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


class _MessageBody(msgspec.Struct):
    error: _Message


class _Kind(msgspec.Struct):
    type: str | None = None
    code: int | str | None = None


class _KindBody(msgspec.Struct):
    error: _Kind


_message_decoder = msgspec.json.Decoder(_MessageBody)
_kind_decoder = msgspec.json.Decoder(_KindBody)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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
    try:
        message = _message_decoder.decode(_first_object(body)).error.message
    except MALFORMED_JSON:
        message = ""
    return (message or body.decode(errors="replace").strip())[:_MAX_MESSAGE_CHARS]


def error_kind(body: bytes) -> str:
    """The type and code of an error body or error event, and the length of the body. For logs: an
    error's message may repeat the prompt.
    """
    try:
        error = _kind_decoder.decode(_first_object(body)).error
    except MALFORMED_JSON:
        error = _Kind()
    named = {"type": error.type or "", "code": "" if error.code is None else str(error.code)}
    shown = [f"{name}={text}" for name, text in named.items() if _NAME.fullmatch(text)]
    return " ".join([*shown, f"bytes={len(body)}"])


def _first_object(body: bytes) -> bytes:
    """The JSON object that the body is, or that its first event has as data."""
    # An event ends with an empty line, and further events may follow.
    return body[body.find(b"{") :].replace(b"\r\n", b"\n").partition(b"\n\n")[0]


def _type_name(status: int) -> str:
    known = _TYPES.get(status)
    if known is not None:
        return known
    try:
        return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "") + "Error"
    except ValueError:
        return "BadRequestError" if status < 500 else "InternalServerError"
