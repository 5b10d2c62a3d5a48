"""Error answers of the engine's API: JSON in OpenAI's shape, also for requests that are not valid
HTTP.
"""

from collections.abc import Mapping
from typing import Any

from aiohttp import http_exceptions, web

from kvferry.errors import RequestRefused
from kvferry.web.errors import error_body


def error_response(
    refusal: RequestRefused, headers: Mapping[str, str] | None = None
) -> web.Response:
    shown = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    return web.Response(
        status=refusal.status,
        body=error_body(refusal),
        content_type="application/json",
        headers={**shown, **(headers or {})},
    )


# -- malformed requests --
# Requests that aiohttp refuses before it calls a handler (bytes that are not HTTP, an unknown
# `Expect` header) get a JSON error that does not contain the client's bytes. aiohttp itself answers
# in plain text and quotes the request, and has no setting to change that, so the connection class
# is replaced.


_MESSAGES: tuple[tuple[type[Exception], str], ...] = (
    (
        http_exceptions.LineTooLong,
        "the request line or a header is longer than this server accepts",
    ),
    (http_exceptions.InvalidHeader, "a header of the request is not valid HTTP"),
    (http_exceptions.BadStatusLine, "the request line is not valid HTTP"),
    (http_exceptions.InvalidURLError, "the address in the request line is not valid"),
    (http_exceptions.HttpProcessingError, "the request is not valid HTTP"),
)


class JsonErrorRunner(web.AppRunner):
    """An AppRunner on whose connections every error is JSON."""

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return _JsonErrorServer(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            **plain._kwargs,  # noqa: SLF001  no public access
        )


class _JsonErrorServer(web.Server):
    """Creates connections whose errors are JSON."""

    def __call__(self) -> web.RequestHandler:
        return _JsonErrorConnection(self, loop=self._loop, **self._kwargs)


class _JsonErrorConnection(web.RequestHandler):
    """A connection whose errors are JSON."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        # aiohttp logs the server's own failures, and raises ConnectionError if a response has
        # already begun.
        super().handle_error(request, status, exc, message)
        return _closing_response(RequestRefused(_message_for(status, exc), status=status))

    async def finish_response(
        self, request: web.BaseRequest, resp: Any, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):
            resp = _closing_response(
                RequestRefused(_http_error_message(resp.status), status=resp.status)
            )
        if "Content-Encoding" in request.headers and not request.content.is_eof():
            # Otherwise aiohttp inflates the rest of the body, without a pause for other clients.
            self._lingering_time = 0.0
        return await super().finish_response(request, resp, start_time)


def _closing_response(refusal: RequestRefused) -> web.Response:
    """An error response after which the connection is closed."""
    response = error_response(refusal)
    response.force_close()
    return response


def _message_for(status: int, exc: BaseException | None) -> str:
    if status >= 500:
        return "the server failed to serve this request; its log says why"
    return next(
        (text for kind, text in _MESSAGES if isinstance(exc, kind)), "the request is not valid HTTP"
    )


def _http_error_message(status: int) -> str:
    return (
        "this server supports only 100-continue in the Expect header"
        if status == 417
        else "the request cannot be served"
    )
