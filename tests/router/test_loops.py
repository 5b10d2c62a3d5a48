"""Tests routers that have themselves as instances: a request that comes back is refused at once,
with an error that names the mistake, and routers in front of routers work.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvloop
from tests.ports import reserve_port
from tests.router.stubs import (
    AS_ADMIN,
    RecordedReleases,
    Stage,
    completes,
    prefills,
    stage,
)
from tests.router.test_proxy import ONE, STREAMED, message

from kvferry.errors import ConfigError
from kvferry.router.app import RouterApp
from kvferry.router.fleet.instances import Role, pair_instances, reaches
from kvferry.router.http.messages import Headers
from kvferry.router.http.via import check_route
from kvferry.router.options import RouterOptions
from kvferry.router.server import run_router
from kvferry.types import Address, FailurePolicy

FEW = 12
"""Far fewer requests than a loop sends, and more than each router needs for one request."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


class LoadBalancer:
    """Passes connections on, so that a router cannot see from an address that it is its own."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.port = 0
        self.target = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LoadBalancer"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except asyncio.CancelledError:
            return

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    self.num_requests += data.count(b"\r\nVia: ")
                    sink.write(data)
                    await sink.drain()
            except (ConnectionError, asyncio.CancelledError):
                pass
            finally:
                sink.close()

        copies = [copy(reader, there_writer), copy(there_reader, writer)]
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*copies)


def port_of(s: Stage) -> int:
    return int(s.url.rpartition(":")[2])


async def join(s: Stage, role: str, host: str, port: int) -> tuple[int, bytes]:
    async with s.session.post(
        f"{s.url}/admin/instances",
        json={"role": role, "url": f"http://{host}:{port}"},
        headers=AS_ADMIN,
    ) as answer:
        return answer.status, await answer.read()


@asynccontextmanager
async def in_a_circle(
    num_routers: int, **settings: Any
) -> AsyncIterator[tuple[Stage, list[LoadBalancer]]]:
    """Routers each of which has the next one as P and as D, and the last one the first."""
    async with AsyncExitStack() as stack:
        stages = [
            await stack.enter_async_context(stage([], [], **settings)) for _ in range(num_routers)
        ]
        balancers = [
            await stack.enter_async_context(LoadBalancer().running()) for _ in range(num_routers)
        ]
        for number, (s, balancer) in enumerate(zip(stages, balancers, strict=True)):
            balancer.target = port_of(stages[(number + 1) % num_routers])
            for role in ("prefill", "decode"):
                assert (await join(s, role, "127.0.0.1", balancer.port))[0] == 201
        yield stages[0], balancers


@pytest.mark.parametrize("num_routers", [1, 2, 3])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ONE),
        ("/v1/completions", STREAMED),
        ("/v1/completions", ONE | {"prompt": ["a", "b"]}),
        ("/v1/chat/completions", CHAT),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/load_lora_adapter", {"lora_name": "a"}),
        ("/v1/models", None),
    ],
)
def test_a_request_that_comes_back_is_refused_at_once(
    num_routers: int, path: str, body: dict[str, Any] | None
) -> None:
    async def scene() -> None:
        settings: dict[str, Any] = {"max_retries": 2, "instance_key": "sk-admin"}
        async with in_a_circle(
            num_routers, without_prefill=FailurePolicy.RECOMPUTE, **settings
        ) as (s, balancers):
            method = "POST" if body is not None else "GET"
            async with s.session.request(
                method, s.url + path, json=body, headers=AS_ADMIN
            ) as answer:
                text = message(await answer.read())
                assert answer.status in (502, 508)
            assert "leads back" in text
            assert sum(balancer.num_requests for balancer in balancers) <= FEW * num_routers

    uvloop.run(scene())


def test_routers_behind_each_other_serve_up_to_a_depth() -> None:
    async def scene() -> None:
        async with AsyncExitStack() as stack:
            chain = [await stack.enter_async_context(stage(prefills, completes))]
            for _ in range(8):
                front = await stack.enter_async_context(stage([], []))
                for role in ("prefill", "decode"):
                    assert (await join(front, role, "127.0.0.1", port_of(chain[-1])))[0] == 201
                chain.append(front)
            for depth in (1, 7):
                assert (await chain[depth].post(ONE))[0] == 200
            assert len(chain[0].d.calls[-1].headers["Via"].split(",")) == 8
            status, headers, body = await chain[8].post(ONE)
            assert (status, "has passed 8 routers" in message(body)) == (508, True)
            assert "Kvferry-Router-Id" in headers
            async with chain[8].session.get(
                f"{chain[8].url}/admin/instances", headers=AS_ADMIN
            ) as answer:
                members = (await answer.json())["instances"]
            assert [member["failures"] for member in members] == [0, 0], "no instance is at fault"

    uvloop.run(scene())


FORGED = [
    "1.1 kvferry-",
    "1.1 kvferry-" + "g" * 16,
    "1.0 fred, 1.1 example.com (Apache/1.1)",
    "1.1 kvferry-" + "0" * 16,
    ", ".join(f"1.1 kvferry-{number:016x}" for number in range(7)),
    "," * 20_000,
    "1.1 kvferry-" * 2_000,
]


@pytest.mark.parametrize("forged", FORGED)
def test_a_client_that_sends_marks_is_served(forged: str) -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            assert (await s.post(ONE, Via=forged))[0] == 200
            sent = s.d.calls[-1].headers["Via"]
            assert check_route("f" * 16, Headers([], {"via": sent})) is None or "00" in sent
            assert all(part.strip().startswith("1.1 kvferry-") for part in sent.split(","))

    uvloop.run(scene())


def test_a_client_that_forges_a_loop_gets_only_its_own_request_refused() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s, stage([], [], failures_in_a_row=1) as front:
            for role in ("prefill", "decode"):
                assert (await join(front, role, "127.0.0.1", port_of(s)))[0] == 201
            assert (await front.post(ONE))[0] == 200
            mark_of_front, mark_of_s = s.d.calls[-1].headers["Via"].split(", ")
            for mark in (mark_of_front, mark_of_s):
                status, _, body = await front.post(ONE, Via=mark)
                assert (status, "leads back here" in message(body)) == (508, True)
                assert (await front.post(ONE))[0] == 200, "no instance was ejected"
            too_many = ", ".join(f"1.1 kvferry-{number:016x}" for number in range(8))
            assert (await front.post(ONE, Via=too_many))[0] == 508

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("host", "listening", "is_own"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("localhost", "127.0.0.1", True),
        ("localhost.", "::1", True),
        ("::ffff:127.0.0.1", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.9", "0.0.0.0", True),
        ("::1", "::", True),
        ("127.0.0.1", "::", True),
        ("127.0.0.2", "127.0.0.1", False),
        ("10.0.0.1", "0.0.0.0", False),
        ("engine.example", "127.0.0.1", False),
    ],
)
def test_an_address_of_the_router_itself_is_recognised(
    host: str, listening: str, is_own: bool
) -> None:
    assert reaches(Address(host, 8000), Address(listening, 8000)) is is_own
    assert not reaches(Address(host, 8001), Address(listening, 8000))


def test_the_router_refuses_its_own_address_at_start_and_when_an_instance_is_added() -> None:
    port = reserve_port()
    own = pair_instances(Role.DECODE, ["localhost"], [port])
    options = RouterOptions(decoders=own, host="127.0.0.1", port=port)
    with pytest.raises(ConfigError, match=r"would be this router, which listens on 127\.0\.0\.1"):
        run_router(options, lambda: RouterApp(options, RecordedReleases()), print)

    async def scene() -> None:
        async with stage(prefills, completes) as s:
            for role in ("prefill", "decode"):
                status, body = await join(s, role, "localhost", port_of(s))
                assert (status, "would be this router" in message(body)) == (400, True)

    uvloop.run(scene())


def test_probes_find_an_address_that_leads_back() -> None:
    async def scene() -> None:
        async with in_a_circle(1, probe_interval_s=0.05) as (s, _):
            while True:
                async with s.session.get(f"{s.url}/admin/instances", headers=AS_ADMIN) as answer:
                    members = (await answer.json())["instances"]
                if all("leads back to this router" in each["last_error"] for each in members):
                    return
                await asyncio.sleep(0.01)

    uvloop.run(scene())
