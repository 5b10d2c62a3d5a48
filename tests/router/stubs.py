"""Small real HTTP servers that stand in for engines, and a router in front of them, all on one
event loop.
"""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import ANY

import aiohttp
from aiohttp import web

from kvferry.protocol.tickets import PushTicketKey
from kvferry.router.app import RouterApp
from kvferry.router.conversations.turns import TurnQuery
from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.fleet.registration import Registrar
from kvferry.router.options import RouterOptions
from kvferry.router.server import make_server, server_tls
from kvferry.router.serving.client_request import Handover
from kvferry.router.serving.legs import FailureQuery
from kvferry.router.serving.side_channel import BlockReleaser
from kvferry.types import Address, FailurePolicy

if TYPE_CHECKING:
    from kvferry.router.tracing import RouterTracer

DEADLINE_S = 120.0
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Call:
    path: str
    headers: Mapping[str, str]
    raw: bytes
    body: dict[str, Any]


@dataclass
class StubEngine:
    """Answers as `behaviour` says and records its requests. Its `/metrics` page advertises a
    transfer mode, as that of an engine does.
    """

    behaviour: Behaviour
    mode: str = "push"
    """The advertised mode; if it is empty, there is no `/metrics` page."""
    side_channel: str = ""
    """The advertised address of the side channel; if it is empty, none is advertised."""
    num_looks: int = 0
    """Number of requests for the `/metrics` page."""
    num_ignored: int = 0
    """Number of health checks that arrived while the engine was stopped."""
    num_tokens: int | None = None
    """The number of computed tokens that the `/metrics` page shows; None: it shows none."""
    more_metrics: bytes = b""
    """Further lines of the `/metrics` page."""
    is_stopped: bool = False
    """The engine accepts connections but does not answer health checks, like a process that is
    stopped.
    """
    before_probe: Callable[[], None] = lambda: None
    """Called at the beginning of each probe; may change any of the above."""
    calls: list[Call] = field(default_factory=list)
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            self.before_probe()
        if self.is_stopped and request.path in ("/metrics", "/health"):
            self.num_ignored += 1
            return await hangs(request, {})
        if request.path == "/metrics":
            return self.show_mode()
        if request.path == "/health":
            return web.Response()
        raw = await request.read()
        is_json = raw and not request.content_type.startswith("multipart/")
        body = json.loads(raw) if is_json else {}
        self.calls.append(Call(request.path, request.headers.copy(), raw, body))
        self.entered.set()
        try:
            return await self.behaviour(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.cancelled.set()
            raise

    def show_mode(self) -> web.Response:
        self.num_looks += 1
        page = (
            "# TYPE kvferry:transfer_mode "
            f'gauge\nkvferry:transfer_mode{{model_name="m",mode="{self.mode}"}} 1.0\n'
        )
        if self.side_channel:
            page += f'kvferry:side_channel{{address="{self.side_channel}"}} 1.0\n'
        if self.num_tokens is not None:
            page += f"vllm:generation_tokens_total {self.num_tokens}\n"
        body = page.encode() + self.more_metrics
        return web.Response(body=body) if self.mode else web.Response(status=404)


@dataclass
class RecordedReleases:
    handovers: list[Handover] = field(default_factory=list)
    push_tickets: list[str] = field(default_factory=list)
    legs: list[tuple[Address, str]] = field(default_factory=list)
    happened: asyncio.Event = field(default_factory=asyncio.Event)

    def release(self, handover: Handover) -> None:
        if handover.push_ticket:
            self.push_tickets.append(handover.push_ticket)
            return
        self.handovers.append(handover)
        self.happened.set()

    def release_leg(self, side_channel: Address, leg_id: str) -> None:
        self.legs.append((side_channel, leg_id))

    @property
    def tickets(self) -> list[str | None]:
        return [handover.ticket for handover in self.handovers]


@dataclass
class Stage:
    url: str
    session: aiohttp.ClientSession
    prefillers: list[StubEngine]
    decoders: list[StubEngine]
    releases: RecordedReleases

    @property
    def p(self) -> StubEngine:
        return self.prefillers[0]

    @property
    def d(self) -> StubEngine:
        return self.decoders[0]

    async def post(
        self, body: object, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(
            self.url + path, data=io.BytesIO(data), headers=named
        ) as answer:
            return answer.status, answer.headers, await answer.read()

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.url}/metrics", headers=AS_ADMIN) as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def listening(app: web.Application, at_port: int = 0) -> AsyncIterator[int]:
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", at_port)
    await site.start()
    try:
        port: int = runner.addresses[0][1]
        yield port
    finally:
        await runner.cleanup()


@asynccontextmanager
async def stub_engine(engine: StubEngine, at_port: int = 0) -> AsyncIterator[StubEngine]:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", engine.handle)
    async with listening(app, at_port) as port:
        engine.port = port
        yield engine


def instance(role: Role, port: int) -> Instance:
    return Instance(role, Address("127.0.0.1", port))


@asynccontextmanager
async def stage(
    prefill: list[Behaviour] | Behaviour,
    decode: list[Behaviour] | Behaviour,
    push_key: PushTicketKey | None = None,
    modes: Sequence[str] = (),
    registrar: Registrar | None = None,
    ask: TurnQuery | None = None,
    ask_failure: FailureQuery | None = None,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A router in front of stub engines. `modes` are the transfer modes of the decode engines, if
    not all of them push; `ask` is the router's query to D's side channel for turns, `ask_failure`
    the one for failed transfers. Everything inside must end within DEADLINE_S.
    """
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        prefillers = [
            await stack.enter_async_context(stub_engine(StubEngine(b))) for b in _listed(prefill)
        ]
        decoders = [
            await stack.enter_async_context(stub_engine(StubEngine(b))) for b in _listed(decode)
        ]
        for engine, mode in zip(decoders, modes, strict=False):
            engine.mode = mode
        options = RouterOptions(
            tuple(instance(Role.PREFILL, engine.port) for engine in prefillers),
            tuple(instance(Role.DECODE, engine.port) for engine in decoders),
        )
        releases = RecordedReleases()
        port = await stack.enter_async_context(
            serving(changed(options, settings), releases, push_key, registrar, ask, ask_failure)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Stage(f"http://127.0.0.1:{port}", session, prefillers, decoders, releases)


TURNS = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "routing": {**TURNS, "without_prefill": FailurePolicy.FAIL, "max_retries": 0},
    "health": {"probe_interval_s": 0.0},
    "access": {"admin_key": "sk-admin"},
}
AS_ADMIN = {"Authorization": "Bearer sk-admin"}
"""The header that makes a request one of the operator."""


def changed(options: RouterOptions, settings: Mapping[str, Any]) -> RouterOptions:
    """Sets settings of any table by name: `idle=1.0`, `max_retries=2`. A setting that is not named
    has its value from `PLAIN`.
    """
    for table in (
        "timeouts",
        "limits",
        "admission",
        "routing",
        "health",
        "conversations",
        "access",
    ):
        current = getattr(options, table)
        known = {entry.name for entry in fields(current)}
        given = {name: value for name, value in settings.items() if name in known}
        options = replace(options, **{table: replace(current, **{**PLAIN.get(table, {}), **given})})
    return replace(options, access_log=settings.get("access_log", False))


@asynccontextmanager
async def serving(
    options: RouterOptions,
    releases: BlockReleaser,
    push_key: PushTicketKey | None = None,
    registrar: Registrar | None = None,
    ask: TurnQuery | None = None,
    ask_failure: FailureQuery | None = None,
    tracer: "RouterTracer | None" = None,
) -> AsyncIterator[int]:
    """Runs a router and yields its port."""
    tls = server_tls(options)
    app = RouterApp(
        options,
        releases,
        push_key=push_key,
        registrar=registrar,
        make_turn_query=None if ask is None else lambda watcher: ask,
        make_failure_query=None if ask_failure is None else lambda watcher: ask_failure,
        tracer=tracer,
    )
    server = make_server(app)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    port: int = sock.getsockname()[1]
    app.listens_at(Address("127.0.0.1", port))
    await app.start()
    try:
        await server.start(sock, tls)
        yield port
    finally:
        await server.close()
        await app.close()


def _listed(behaviours: list[Behaviour] | Behaviour) -> list[Behaviour]:
    return behaviours if isinstance(behaviours, list) else [behaviours]


# -- behaviours --

KEEP_NOTHING = {"conversation": None, "leg_id": ANY}
"""The parameters that tell D that a request belongs to no conversation, and the id of the leg."""
PARAMS = {
    "do_remote_prefill": True,
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "ticket": "ticket-1",
    "remote_block_ids": [[1, 2, 3]],
}


async def prefills(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": PARAMS})


async def prefills_without_blocks(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"id": "p", "choices": [{"text": "x"}], "kv_transfer_params": None})


async def completes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"id": "d", "choices": [{"text": "hello"}]})


async def hangs(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@asynccontextmanager
async def router(
    prefill_port: int, decode_port: int, push_key: PushTicketKey | None = None
) -> AsyncIterator[tuple[str, RecordedReleases]]:
    releases = RecordedReleases()
    options = changed(
        RouterOptions(
            (instance(Role.PREFILL, prefill_port),), (instance(Role.DECODE, decode_port),)
        ),
        {},
    )
    async with serving(options, releases, push_key) as port:
        yield f"http://127.0.0.1:{port}", releases


async def drops_connection(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    await asyncio.sleep(0)
    return web.Response()


def answers(
    status: int, text: str, content_type: str = "application/json", **headers: str
) -> Behaviour:
    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(
            status=status, body=text.encode(), headers={"Content-Type": content_type, **named}
        )

    return behave


def streams(
    chunks: list[bytes],
    then: str = "end",
    content_type: str = "text/event-stream; charset=utf-8",
    status: int = 200,
) -> Behaviour:
    """Sends each chunk in a write of its own, then ends, hangs, or drops the connection."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": content_type})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0)
        if then == "hang":
            await asyncio.Event().wait()
        if then == "drop":
            assert request.transport is not None
            request.transport.abort()
        return response

    return behave
