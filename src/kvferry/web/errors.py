"""OpenAI-style error bodies: every answer that is not a success has this shape.

Pure but for building aiohttp responses; nothing here logs.
"""

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from kvferry.errors import RequestRefused

__all__ = ["ErrorBody", "ErrorDetail", "error_body", "error_response"]

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(refusal: RequestRefused) -> bytes:
    detail = ErrorDetail(message=refusal.message, type=_type_name(refusal.status), param=refusal.param, code=refusal.status)
    return msgspec.json.encode(ErrorBody(detail))


def error_response(refusal: RequestRefused, headers: Mapping[str, str] | None = None) -> web.Response:
    shown = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    return web.Response(
        status=refusal.status, body=error_body(refusal), content_type="application/json", headers={**shown, **(headers or {})}
    )


def _type_name(status: int) -> str:
    known = _TYPES.get(status)
    if known is not None:
        return known
    try:
        return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "") + "Error"
    except ValueError:
        return "BadRequestError" if status < 500 else "InternalServerError"
