"""The router application: builds the parts of a router and dispatches requests.

Made and used on one event loop: `RouterApp.start`, then `admit` and `handle` for every request,
then `close`. `admit` decides from a request's head, so that no body is read for a request without
access. A path belongs either to a page of the router or to a route of the engines, never to both.
"""

import asyncio
import logging
import random
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError, RequestRefused
from kvferry.protocol.tickets import PushTicketKey
from kvferry.router.access import AccessPolicy
from kvferry.router.access_log import AccessLog
from kvferry.router.admin import Admin
from kvferry.router.conversations.store import Conversations
from kvferry.router.conversations.turns import TurnQuery, TurnTracker
from kvferry.router.fleet.dns import ServiceResolver
from kvferry.router.fleet.fleet import Fleet, FleetOptions
from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.fleet.registration import ROUTER_ID_HEADER, AcceptedStatements, Registrar
from kvferry.router.fleet.services import DiscoveredInstances
from kvferry.router.fleet.watcher import InstanceWatcher
from kvferry.router.http.messages import ServerRequest
from kvferry.router.http.pool import UpstreamPool
from kvferry.router.http.server import ResponseParts
from kvferry.router.http.via import check_route
from kvferry.router.http.writer import ResponseWriter
from kvferry.router.metrics import RouterMetrics
from kvferry.router.options import RouterOptions
from kvferry.router.pages import Pages
from kvferry.router.routes.adapters import Adapters
from kvferry.router.routes.one_instance import OneInstanceHandler
from kvferry.router.routes.table import Api, Route, RouteTable, is_administrative
from kvferry.router.serving.admission import AdmissionController, AdmissionOptions
from kvferry.router.serving.client_request import Handover
from kvferry.router.serving.context import (
    HttpResponse,
    build_error_response,
    choose_request_id,
    shaped_answer,
)
from kvferry.router.serving.dispatch import Dispatcher
from kvferry.router.serving.generate import GenerateHandler
from kvferry.router.serving.instance_client import InstanceClient
from kvferry.router.serving.legs import FailureQuery
from kvferry.router.serving.push import LegFinisher, PushSources
from kvferry.router.serving.side_channel import BlockReleaser
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RecentRequests
from kvferry.types import Address, FailurePolicy

if TYPE_CHECKING:
    from kvferry.router.tracing import RouterTracer

_log = logging.getLogger(__name__)

_Page = Callable[[ServerRequest], Awaitable[HttpResponse]]
_SHOWN_ROUTE_CHARS = 100
_CHALLENGE = ("WWW-Authenticate", "Bearer")
_MAX_PAGE_BODY = 64 * 1024
"""Largest body of a request for a page of the router. Some pages need no key, so it is small."""


class RouterApp:
    """One router: owns the fleet, the connection pool, the watcher and all request handlers."""

    def __init__(
        self,
        options: RouterOptions,
        releases: BlockReleaser,
        *,
        push_key: PushTicketKey | None = None,
        registrar: Registrar | None = None,
        make_turn_query: Callable[[InstanceWatcher], TurnQuery] | None = None,
        make_failure_query: Callable[[InstanceWatcher], FailureQuery] | None = None,
        tracer: "RouterTracer | None" = None,
    ) -> None:
        """Build the router without starting it.

        Without `push_key`, prefill legs always run before decode legs. `make_turn_query` makes the
        function that asks decode instances for retained turns that are missing from streams,
        `make_failure_query` the function that asks instances why a transfer failed. `tracer` writes
        the spans of requests; the caller closes it.
        """
        self.options = options
        self.metrics = RouterMetrics(
            f"{options.routing.prefill_policy}, {options.routing.decode_policy}"
        )
        self.access_policy = AccessPolicy.of(options.access)
        self.fleet = _make_fleet(options, time.monotonic())
        self.admission = AdmissionController(_admission_options(options), time.monotonic)
        self._upstreams = UpstreamPool()
        recent = RecentRequests()
        self._access_log = AccessLog(options.access_log)
        time_series = TimeSeries()
        conversations = Conversations(
            options.conversations.max_count, options.conversations.max_bytes
        )
        self._router_id = secrets.token_hex(8)
        instance_client = InstanceClient(
            options,
            self.fleet,
            self._upstreams,
            self.metrics,
            time_series,
            self._router_id,
            _client_tls(options),
        )
        push_sources = PushSources(push_key)

        def forget(instance: Instance) -> None:
            conversations.forget(instance)
            push_sources.forget(instance)

        self.watcher = InstanceWatcher(instance_client, forget, cleanup=conversations.expire)
        ask_turn = make_turn_query(self.watcher) if make_turn_query is not None else None
        ask_failure = make_failure_query(self.watcher) if make_failure_query is not None else None
        self._turns = TurnTracker(
            conversations, self.fleet, self.metrics, options.conversations.ttl, ask_turn
        )
        self._leg_finisher = LegFinisher()
        dispatcher = Dispatcher(
            instance_client,
            _CountingReleaser(releases, self.metrics),
            push_sources,
            self.watcher,
            turns=self._turns,
            leg_finisher=self._leg_finisher,
            ask_failure=ask_failure,
        )
        self._engine_routes = RouteTable(options.routing.forwarded_routes)
        self._generate_handler = GenerateHandler(
            options,
            self.access_policy,
            self.admission,
            serving=dispatcher,
            one_instance=OneInstanceHandler(instance_client),
            recent=recent,
            time_series=time_series,
            access_log=self._access_log,
            tracer=tracer,
        )
        admin = Admin(
            self.fleet,
            registrar,
            self.watcher.probe_now,
            self.watcher.forget_instance,
            AcceptedStatements(self._router_id),
        )
        pages = Pages(
            options,
            self.access_policy,
            self.fleet,
            self.watcher,
            admission=self.admission,
            conversations=conversations,
            recent=recent,
            time_series=time_series,
            instance_client=instance_client,
        )
        self._pages = _page_handlers(pages, admin, Adapters(instance_client))
        self._resolver = ServiceResolver(
            options.services,
            options.discovery,
            DiscoveredInstances(self.fleet, self.watcher.forget_instance),
            self.watcher.probe_now,
        )
        self._background: list[asyncio.Task[None]] = []

    def listens_at(self, address: Address) -> None:
        """Note where the server listens; ConfigError if that is the address of an instance."""
        self.fleet.listening = address
        for member in self.fleet.members():
            self.fleet.check_foreign(member.instance)

    async def start(self) -> None:
        self._background = [
            asyncio.create_task(self.watcher.run()),
            asyncio.create_task(self._resolver.run()),
        ]
        for task in self._background:
            task.add_done_callback(_log_unexpected_end)

    def stop_admitting(self) -> None:
        """Refuse new requests from now on; `/readyz` reports 503."""
        self.admission.close()

    async def close(self) -> None:
        """Stop all background tasks and close all connections to instances."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.watcher.close()
        await self._turns.close()
        await self._leg_finisher.close()
        await self._upstreams.close()
        self._generate_handler.limits.close()

    # -- called by the HTTP server --

    def admit(self, request: ServerRequest) -> ResponseParts | None:
        """Answer requests that need no body: unknown route, missing key, CORS preflight, body too
        large. None admits the request.
        """
        route = self._route(request.path)
        methods = route.methods if route is not None else tuple(self._find_page(request.path))
        if methods and _is_preflight(request):
            headers = self.access_policy.preflight_headers(request.headers, methods)
            return 204, [*headers, _id_header(request)], b""
        refusal = self._check(request, methods, is_page=route is None)
        return None if refusal is None else self._refuse(request, route, refusal)

    def _check(
        self, request: ServerRequest, methods: tuple[str, ...], *, is_page: bool
    ) -> HttpResponse | None:
        """The answer to a request that is refused; None if the request is admitted."""
        policy = self.access_policy
        cors = policy.cors_headers(request.headers)
        loop = check_route(self._router_id, request.headers)
        if loop is not None:
            headers = [(ROUTER_ID_HEADER, self._router_id), *cors]
            return build_error_response(loop.status, loop.message, headers=headers)
        if not methods:
            return _unknown_route(request, cors)
        if request.method not in methods and not (request.method == "HEAD" and "GET" in methods):
            message = f"{_route_text(request)}: Method Not Allowed"
            allow = ("Allow", ", ".join(methods))
            return build_error_response(405, message, headers=[allow, *cors])
        if is_page and _is_large(request):
            message = f"this path accepts no body of more than {_MAX_PAGE_BODY} bytes"
            return build_error_response(413, message, headers=cors)
        if policy.is_refused(request, is_page=is_page):
            message = "the API key is missing or unknown"
            return build_error_response(401, message, headers=[_CHALLENGE, *cors])
        # Instances register with the cluster's secret instead of the admin key.
        needs_admin_key = policy.is_admin_path(request.path) and request.path != "/admin/register"
        if is_page and needs_admin_key and not policy.is_admin(request.headers):
            message = "this path needs the admin key"
            return build_error_response(401, message, headers=[_CHALLENGE])
        return None

    async def handle(self, request: ServerRequest, reply: ResponseWriter) -> None:
        """Serve one admitted request."""
        route = self._route(request.path)
        self.metrics.active.value += 1
        try:
            if route is not None:
                await self._generate_handler.generate(route, request, reply)
            else:
                await self._serve_page(request, reply)
        finally:
            self.metrics.active.value -= 1
            self._count(request, route, reply.status)

    async def _serve_page(self, request: ServerRequest, reply: ResponseWriter) -> None:
        method = "GET" if request.method == "HEAD" else request.method
        page = self._find_page(request.path).get(method)
        assert page is not None, "admit has checked this"
        answer = await page(request)
        id_header = self._log_page(request, answer.status)
        cors = self.access_policy.cors_headers(request.headers)
        reply.send(answer.status, [*answer.headers, id_header, *cors], answer.body)

    def _route(self, path: str) -> Route | None:
        """The engines' route for a path; None if the path is a page of the router, or unknown. A
        pattern of `routing.forwarded_routes` never covers a page.
        """
        return None if self._find_page(path) else self._engine_routes.find(path)

    def _find_page(self, path: str) -> Mapping[str, _Page]:
        """The handlers of a page by method; empty if the path is no page. A page whose path ends
        with a slash also covers the paths one level below.
        """
        found = self._pages.get(path)
        if found is None:
            parent = path.rpartition("/")[0] + "/"
            found = self._pages.get(parent, {})
        return found

    def _refuse(
        self, request: ServerRequest, route: Route | None, answer: HttpResponse
    ) -> ResponseParts:
        self._count(request, route, answer.status)
        shaped = shaped_answer(route.api if route is not None else Api.OTHER, answer)
        id_header = self._log_page(request, shaped.status)
        return shaped.status, [*shaped.headers, id_header], shaped.body

    def _log_page(self, request: ServerRequest, status: int) -> tuple[str, str]:
        """Log a page or a refusal. Returns the header with the request id of the log line."""
        id_header = _id_header(request)
        self._access_log.note_page(id_header[1], request.method, request.path, status)
        return id_header

    def note_malformed(self, refusal: RequestRefused) -> None:
        """Count a request that the server refused: malformed, too large, too slow, or over the
        connection limit.
        """
        self.metrics.requests.add("malformed", str(refusal.status))
        self._access_log.note_page("", "", "malformed", refusal.status)

    def _count(self, request: ServerRequest, route: Route | None, status: int) -> None:
        if not status:
            return  # the client disconnected before the answer began
        # Clients choose the paths, and a label must not have unlimited values.
        page = request.path if request.path in self._pages else "other"
        self.metrics.requests.add(page if route is None else route.pattern, str(status))


def _log_unexpected_end(task: asyncio.Task[None]) -> None:
    """Log the error that ended a background task. The router serves on without the task."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.error("a background task of the router ended; restart the router", exc_info=error)


def _client_tls(options: RouterOptions) -> ssl.SSLContext:
    """TLS settings for instances: certificates are checked against the configured authority, or
    the public authorities.
    """
    file = options.access.instance_ca_file
    try:
        return ssl.create_default_context(cafile=file or None)
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(
            f"the CA certificates for instances in {file} cannot be loaded "
            f"({error.strerror or error})"
        ) from None


def _admission_options(options: RouterOptions) -> AdmissionOptions:
    """With API keys and no explicit `tenant_waiting`, a tenant may fill at most half the queue."""
    admission = options.admission
    if not options.access.api_keys or admission.tenant_waiting is not None:
        return admission
    return replace(admission, tenant_waiting=max(1, admission.max_waiting // 2))


def _make_fleet(options: RouterOptions, now: float) -> Fleet:
    policies = {
        Role.PREFILL: options.routing.prefill_policy,
        Role.DECODE: options.routing.decode_policy,
    }
    spare = frozenset(
        {Role.PREFILL} if options.routing.without_prefill is FailurePolicy.RECOMPUTE else ()
    )
    fleet = Fleet(FleetOptions(policies, spare, health=options.health), random.random)
    for instance in (*options.prefillers, *options.decoders):
        fleet.add(instance, now)
    return fleet


def _page_handlers(
    pages: Pages, admin: Admin, adapters: Adapters
) -> dict[str, Mapping[str, _Page]]:
    """The handlers of all pages of the router, by path and method."""
    handlers: dict[str, Mapping[str, _Page]] = {
        path: {"GET": page} for path, page in pages.routes().items()
    }
    for path, methods in admin.routes().items():
        handlers[path] = {method: _from_body(answer) for method, answer in methods.items()}
    for path, page in adapters.routes().items():
        handlers[path] = {"POST": page}
    handlers["/ping"] = {"GET": pages.health, "POST": pages.health}
    return handlers


def _from_body(answer: Callable[[bytes], HttpResponse]) -> _Page:
    async def page(request: ServerRequest) -> HttpResponse:
        return answer(bytes(request.body))

    return page


def _is_preflight(request: ServerRequest) -> bool:
    """Whether a browser asks which requests a web page of another origin may send."""
    asked = request.headers.get("access-control-request-method")
    return request.method == "OPTIONS" and asked is not None


def _is_large(request: ServerRequest) -> bool:
    """True if the body is too large for a page, or its length is unknown."""
    length = request.headers.get("content-length")
    return request.headers.get("transfer-encoding") is not None or (
        length is not None and int(length) > _MAX_PAGE_BODY
    )


def _unknown_route(request: ServerRequest, cors: list[tuple[str, str]]) -> HttpResponse:
    if is_administrative(request.path):
        message = "this route administers one engine, and the router does not forward it"
        return build_error_response(403, f"{_route_text(request)}: {message}", headers=cors)
    return build_error_response(404, f"{_route_text(request)}: Not Found", headers=cors)


def _id_header(request: ServerRequest) -> tuple[str, str]:
    return "X-Request-Id", choose_request_id(request.headers.get("x-request-id"))


def _route_text(request: ServerRequest) -> str:
    return f"{request.method} {request.path}"[:_SHOWN_ROUTE_CHARS]


class _CountingReleaser:
    """Counts releases and passes them on."""

    def __init__(self, releases: BlockReleaser, metrics: RouterMetrics) -> None:
        self._releases = releases
        self._metrics = metrics

    def release(self, handover: Handover) -> None:
        self._metrics.releases.add()
        self._releases.release(handover)

    def release_leg(self, side_channel: Address, leg_id: str) -> None:
        self._metrics.releases.add()
        self._releases.release_leg(side_channel, leg_id)
