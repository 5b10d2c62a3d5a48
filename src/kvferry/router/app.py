"""The router's HTTP application: routes, error answers, and the life of its connections to instances."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
from aiohttp import web

from kvferry.errors import TransportError
from kvferry.protocol.push_tickets import PushTicketKey
from kvferry.router.failures import error_response
from kvferry.router.instances import InstancePool, Outcome, Role
from kvferry.router.legs import Handover
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.proxy import Proxy
from kvferry.router.release import Releases

__all__ = ["make_app"]

_log = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# vLLM's server closes idle connections after 5 s; reusing one in that very moment would fail the request, so ours are closed before.
_KEEPALIVE_S = 4.0
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(options: RouterOptions, releases: Releases, push_key: PushTicketKey | None = None) -> web.Application:
    """The application for one router. Serve it with handler cancellation on, or departing clients are not noticed.

    Without a key for push tickets, prefill instances are always asked first."""
    router = _Router(options, releases, push_key)
    app = web.Application(client_max_size=options.max_body_bytes, middlewares=[router.guard])
    app.cleanup_ctx.append(router.connections)
    app.router.add_post("/v1/completions", router.generate)
    app.router.add_post("/v1/chat/completions", router.generate)
    app.router.add_get("/v1/models", router.models)
    app.router.add_get("/health", router.health)
    app.router.add_get("/healthcheck", router.health)
    app.router.add_get("/metrics", router.show_metrics)
    return app


class _Router:
    """Joins the parts. `_proxy` exists while the application runs."""

    def __init__(self, options: RouterOptions, releases: Releases, push_key: PushTicketKey | None) -> None:
        self._options = options
        self._pool = InstancePool(options.prefillers, options.decoders)
        self._metrics = RouterMetrics()
        self._releases = _Counted(releases, self._metrics)
        self._push_key = push_key
        self._proxy: Proxy | None = None

    async def connections(self, _: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        ) as session:
            self._proxy = Proxy(self._options, self._pool, session, self._releases, self._metrics, self._push_key)
            yield
            await self._proxy.close()
            self._proxy = None

    @web.middleware
    async def guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """The top of every request: counts it and turns what went wrong into an answer."""
        self._metrics.active.inc()
        try:
            response = await self._answer(request, handler)
        except asyncio.CancelledError:
            self._metrics.aborts.inc()
            raise
        finally:
            self._metrics.active.dec()
        resource = request.match_info.route.resource
        self._metrics.requests.labels(resource.canonical if resource else "none", str(response.status)).inc()
        return response

    async def _answer(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return error_response(413, f"the request body is larger than {self._options.max_body_bytes} bytes")
        except web.HTTPException as error:
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            return error_response(error.status, f"{_shown_route(request)}: {error.reason}", allow)
        except TransportError as error:
            _log.warning("request failed: %s", error)
            return error_response(502, str(error))
        except Exception:
            _log.exception("request failed by a bug path=%s", request.path)
            return error_response(500, "the router failed to serve this request; its log says why")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert self._proxy is not None
        return await self._proxy.generate(request)

    async def models(self, request: web.Request) -> web.StreamResponse:
        assert self._proxy is not None
        return await self._proxy.models(request)

    async def health(self, _: web.Request) -> web.StreamResponse:
        """Of the router: it is well whatever its instances are. Nobody is asked; these are the outcomes of the last legs."""
        counts = {f"{role}_instances": len(self._pool.of(role)) for role in Role}
        last = {f"{role}_last_{outcome}": self._pool.count(role, outcome) for role in Role for outcome in Outcome}
        return web.json_response({"status": "ok", **counts, **last})

    async def show_metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": _METRICS_TYPE})


def _shown_route(request: web.Request) -> str:
    """A path may hold bytes that are no text."""
    return f"{request.method} {request.path}".encode(errors="replace").decode()


class _Counted:
    """Releases, counted on their way."""

    def __init__(self, releases: Releases, metrics: RouterMetrics) -> None:
        self._releases = releases
        self._metrics = metrics

    def release(self, handover: Handover) -> None:
        self._metrics.releases.inc()
        self._releases.release(handover)
