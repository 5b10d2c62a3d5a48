"""Tests changes to the fleet while requests flow: by an operator, or by instances that register and
leave by themselves.
"""

import asyncio
import json
import time
from math import inf, nan
from typing import Any

import pytest
import uvloop
from aiohttp import web
from tests.router.stubs import AS_ADMIN, Stage, StubEngine, completes, prefills, stage, stub_engine
from tests.router.test_proxy import ONE, message

from kvferry.cli.register import Registration, check_router_url
from kvferry.errors import ConfigError, InvalidTicket
from kvferry.router.fleet.instances import Instance, Role
from kvferry.router.fleet.registration import (
    MAX_CLOCK_SKEW_S,
    ROUTER_ID_HEADER,
    AcceptedStatements,
    Registrar,
    Statement,
)
from kvferry.types import Address

REGISTRAR = Registrar(b"a secret of the cluster")


async def ask(s: Stage, method: str, path: str, body: object = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with s.session.request(
        method, s.url + path, data=None if body is None else data, headers=AS_ADMIN
    ) as answer:
        return answer.status, await answer.json()


def named(engine: StubEngine, role: str = "decode") -> dict[str, str]:
    return {"role": role, "url": f"http://127.0.0.1:{engine.port}"}


def test_an_instance_is_added_drained_and_removed_while_requests_flow() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s, stub_engine(StubEngine(completes)) as new:
            assert (await s.post(ONE))[0] == 200
            status, added = await ask(s, "POST", "/admin/instances", named(new))
            assert (status, added["state"], added["role"]) == (201, "new", "decode")
            for _ in range(4):
                assert (await s.post(ONE))[0] == 200
            assert (len(s.d.calls), len(new.calls)) == (3, 2)
            assert (await ask(s, "POST", "/admin/instances/drain", named(s.d)))[1][
                "state"
            ] == "draining"
            for _ in range(3):
                assert (await s.post(ONE))[0] == 200
            assert (len(s.d.calls), len(new.calls)) == (3, 5)
            assert (await ask(s, "DELETE", "/admin/instances", named(s.d)))[1]["state"] == "gone"
            _, shown = await ask(s, "GET", "/admin/instances")
            assert [
                (entry["role"], entry["url"])
                for entry in shown["instances"]
                if entry["role"] == "decode"
            ] == [("decode", f"http://127.0.0.1:{new.port}")]

    uvloop.run(scene())


def test_a_drained_instance_finishes_what_it_has_and_comes_back_when_it_is_added_again() -> None:
    async def scene() -> None:
        go = asyncio.Event()

        async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go.wait()
            return await completes(request, body)

        async with stage(prefills, waits) as s:
            under_way = asyncio.create_task(s.post(ONE))
            await s.d.entered.wait()
            await ask(s, "POST", "/admin/instances/drain", named(s.d))
            status, _, body = await s.post(ONE)
            assert (status, message(body)) == (503, "no decode instance is available; try again")
            go.set()
            assert (await under_way)[0] == 200
            await ask(s, "POST", "/admin/instances", named(s.d))
            assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


def test_a_removed_instance_keeps_the_request_that_it_works_on() -> None:
    async def scene() -> None:
        go = asyncio.Event()

        async def waits(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go.wait()
            return await completes(request, body)

        async with stage(prefills, waits) as s:
            under_way = asyncio.create_task(s.post(ONE))
            await s.d.entered.wait()
            assert (await ask(s, "DELETE", "/admin/instances", named(s.d)))[0] == 200
            go.set()
            assert (await under_way)[0] == 200

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/admin/instances", {"role": "decode"}, 400),
        ("POST", "/admin/instances", {"role": "both", "url": "http://a:1"}, 400),
        ("POST", "/admin/instances", {"role": "decode", "url": "file:///etc/passwd"}, 400),
        ("POST", "/admin/instances", b"[[[", 400),
        ("POST", "/admin/instances", b"\xff", 400),
        ("POST", "/admin/instances/drain", {"role": "decode", "url": "http://nowhere:1"}, 404),
        ("DELETE", "/admin/instances", {"role": "decode", "url": "http://nowhere:1"}, 404),
        ("POST", "/admin/register", {"statement": "forged"}, 403),
        ("POST", "/admin/register", {}, 400),
        ("PUT", "/admin/instances", {}, 405),
    ],
)
def test_what_is_no_order_changes_nothing(
    method: str, path: str, body: object, status: int
) -> None:
    async def scene() -> None:
        async with stage(prefills, completes, registrar=REGISTRAR) as s:
            _, before = await ask(s, "GET", "/admin/instances")
            answered, error = await ask(s, method, path, body)
            assert (answered, set(error["error"])) == (status, {"message", "type", "param", "code"})
            assert (await ask(s, "GET", "/admin/instances"))[1] == before

    uvloop.run(scene())


# -- instances that register themselves --


def statement(engine: StubEngine, **changes: Any) -> dict[str, str]:
    values: dict[str, Any] = {
        "role": Role.DECODE,
        "url": f"http://127.0.0.1:{engine.port}",
        "ttl_s": 30.0,
        "made_at": time.time(),
    }
    return {"statement": REGISTRAR.sign(Statement(**{**values, **changes}))}


async def router_id(s: Stage) -> str:
    """The id that the router reports to an instance that does not know it."""
    async with s.session.post(f"{s.url}/admin/register", json=statement(s.p)) as answer:
        assert answer.status == 409
        return answer.headers[ROUTER_ID_HEADER]


def test_an_instance_registers_itself_and_leaves() -> None:
    async def scene() -> None:
        async with (
            stage(prefills, [], registrar=REGISTRAR) as s,
            stub_engine(StubEngine(completes)) as new,
        ):
            to = await router_id(s)

            async def says(**changes: Any) -> int:
                sent = statement(new, router_id=to, **changes)
                return (await ask(s, "POST", "/admin/register", sent))[0]

            assert (await s.post(ONE))[0] == 503
            assert await says() == 200
            assert (await s.post(ONE))[0] == 200
            assert await says(is_leaving=True) == 200
            assert (await s.post(ONE))[0] == 503
            # The next incarnation at the same address.
            assert await says() == 200
            assert (await s.post(ONE))[0] == 200

    uvloop.run(scene())


async def first_answer(s: Stage) -> None:
    """Return once the router answers a request; until then it may have no decode instance."""
    while (await s.post(ONE))[0] != 200:
        await asyncio.sleep(0.01)


def test_kvferry_register_keeps_an_instance_in_the_fleet_until_it_is_stopped() -> None:
    async def scene() -> None:
        async with (
            stage(prefills, [], registrar=REGISTRAR) as s,
            stub_engine(StubEngine(completes)) as new,
        ):
            one = Instance(Role.DECODE, Address("127.0.0.1", new.port))
            registration = Registration(one, [s.url], REGISTRAR, ttl_s=1.0)
            running = asyncio.create_task(asyncio.to_thread(registration.run))
            try:
                async with asyncio.timeout(60):
                    await first_answer(s)
                    # On a busy machine a renewal may come late. The next one registers the
                    # instance again, so only an answer after several TTLs counts.
                    await asyncio.sleep(3 * registration.ttl_s)
                    await first_answer(s)
            finally:
                registration.stop()
                await running
            assert (await s.post(ONE))[0] == 503

    uvloop.run(scene())


BROKEN_ANSWERS = [
    b"no HTTP\r\n\r\n",
    f"HTTP/1.1 409 Conflict\r\n{ROUTER_ID_HEADER}: r\r\nContent-Length: 0\r\n\r\n".encode(),
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",  # the statement is accepted
    b"HTTP/1.1 500 Error\r\nContent-Length: 9\r\n\r\n{}",
]


def test_registration_survives_broken_answers_and_leaves_routers_that_may_have_accepted_it() -> (
    None
):
    """`kvferry serve` registers in a thread: an engine whose thread ends drops out of the fleet."""

    async def scene() -> None:
        answers_left, statements = iter(BROKEN_ANSWERS), list[Statement]()
        has_sent_all = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            body = json.loads(await reader.readexactly(length))
            statements.append(REGISTRAR.open(body["statement"], time.time()))
            next_answer = next(answers_left, None)
            if next_answer is None:
                has_sent_all.set()
            writer.write(next_answer or BROKEN_ANSWERS[-1])
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with asyncio.timeout(60), server, stub_engine(StubEngine(completes)) as new:
            one = Instance(Role.DECODE, Address("127.0.0.1", new.port))
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            registration = Registration(one, [url], REGISTRAR, ttl_s=1.0)
            running = asyncio.create_task(asyncio.to_thread(registration.run))
            sent = asyncio.create_task(has_sent_all.wait())
            await asyncio.wait({sent, running}, return_when=asyncio.FIRST_COMPLETED)
            registration.stop()
            await running
            assert sent.done()
            assert (statements[-1].is_leaving, statements[-1].router_id) == (True, "r")

    uvloop.run(scene())


def test_a_statement_is_good_for_one_time() -> None:
    """An eavesdropper must not bring an instance back that has left, nor make one leave."""

    async def scene() -> None:
        async with (
            stage(prefills, [], registrar=REGISTRAR) as s,
            stub_engine(StubEngine(completes)) as new,
        ):
            to = await router_id(s)
            joins = statement(new, router_id=to)
            leaves = statement(new, router_id=to, is_leaving=True)
            assert (await ask(s, "POST", "/admin/register", joins))[0] == 200
            assert (await ask(s, "POST", "/admin/register", leaves))[0] == 200
            status, error = await ask(s, "POST", "/admin/register", joins)
            assert (status, "was accepted before" in error["error"]["message"]) == (403, True)
            assert (await s.post(ONE))[0] == 503, "it has not come back"
            again = statement(new, router_id=to)
            assert (await ask(s, "POST", "/admin/register", again))[0] == 200
            assert (await ask(s, "POST", "/admin/register", leaves))[0] == 403
            assert (await s.post(ONE))[0] == 200, "it has not left"

    uvloop.run(scene())


def test_a_statement_for_one_router_is_not_good_for_another_or_its_next_incarnation() -> None:
    async def scene() -> None:
        async with stage(prefills, completes, registrar=REGISTRAR) as s:
            heard = statement(s.d, router_id=await router_id(s))
            assert (await ask(s, "POST", "/admin/register", heard))[0] == 200
        async with stage(prefills, [], registrar=REGISTRAR) as s:
            assert (await ask(s, "POST", "/admin/register", heard))[0] == 409
            assert len((await ask(s, "GET", "/admin/instances"))[1]["instances"]) == 1

    uvloop.run(scene())


def test_only_recent_statements_are_remembered() -> None:
    accepted = AcceptedStatements("router")
    for port in range(100):
        one = Instance(Role.DECODE, Address("10.0.0.1", 1000 + port))
        made_at = port * MAX_CLOCK_SKEW_S
        accepted.accept(Statement(Role.DECODE, one.url, 30.0, made_at), one, now=made_at)
    assert len(accepted._made_at) == 2  # noqa: SLF001


def test_an_instance_that_does_not_renew_is_forgotten() -> None:
    async def scene() -> None:
        async with (
            stage(prefills, [], registrar=REGISTRAR) as s,
            stub_engine(StubEngine(completes)) as new,
        ):
            sent = statement(new, router_id=await router_id(s), ttl_s=1.0)
            assert (await ask(s, "POST", "/admin/register", sent))[0] == 200
            while (await ask(s, "GET", "/admin/instances"))[1]["instances"][1:]:
                await asyncio.sleep(0.01)
            assert (await s.post(ONE))[0] == 503

    uvloop.run(scene())


@pytest.mark.parametrize(
    ("age_s", "ttl_s"),
    [
        *((age_s, 30.0) for age_s in (3600, -3600, nan, inf, -inf, 1e300, -1e300)),
        *((0.0, ttl_s) for ttl_s in (nan, inf, -inf, -1.0, 0.0, -0.0, 0.01, 3601.0, 1e300)),
    ],
)
def test_a_statement_that_is_old_or_odd_is_refused(age_s: float, ttl_s: float) -> None:
    async def scene() -> None:
        async with stage(prefills, completes, registrar=REGISTRAR) as s:
            odd = statement(s.d, made_at=time.time() - age_s, ttl_s=ttl_s)
            assert (await ask(s, "POST", "/admin/register", odd))[0] == 403

    uvloop.run(scene())


@pytest.mark.parametrize("made_at", [nan, 1000.0])
def test_a_statement_whose_time_is_not_later_than_the_last_one_is_refused(made_at: float) -> None:
    accepted, one = AcceptedStatements("router"), Instance(Role.DECODE, Address("10.0.0.1", 1))
    accepted.accept(Statement(Role.DECODE, one.url, 30.0, 1000.0), one, now=1000.0)
    with pytest.raises(InvalidTicket):
        accepted.accept(Statement(Role.DECODE, one.url, 30.0, made_at), one, now=1000.0)


def test_a_statement_sealed_with_another_secret_is_refused() -> None:
    async def scene() -> None:
        other = Registrar(b"another secret")
        async with stage(prefills, completes, registrar=REGISTRAR) as s:
            sealed = other.sign(Statement(Role.DECODE, "http://127.0.0.1:1", 30.0, time.time()))
            status, error = await ask(s, "POST", "/admin/register", {"statement": sealed})
            assert (status, "cluster's secret" in error["error"]["message"]) == (403, True)

    uvloop.run(scene())


def test_without_a_secret_nobody_registers() -> None:
    async def scene() -> None:
        async with stage(prefills, completes) as s:
            assert (await ask(s, "POST", "/admin/register", statement(s.d)))[0] == 403

    uvloop.run(scene())


def test_metrics_forget_an_instance_also_when_its_last_leg_outlives_it() -> None:
    """Instances that register themselves have a new port each time, so the metrics page would grow
    without bound.
    """

    async def scene() -> None:
        go_on = asyncio.Event()

        async def completes_later(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await go_on.wait()
            return await completes(request, body)

        async with stage(prefills, completes_later) as s:
            request = asyncio.create_task(s.post(ONE))
            await s.d.entered.wait()
            assert (await ask(s, "DELETE", "/admin/instances", named(s.d)))[0] == 200
            go_on.set()
            assert (await request)[0] == 200
            async with s.session.get(f"{s.url}/metrics") as answer:
                page = await answer.text()
            assert f"127.0.0.1:{s.p.port}" in page
            assert f"127.0.0.1:{s.d.port}" not in page

    uvloop.run(scene())


@pytest.mark.parametrize("host", ["a b", "a\nb", "a\0b", "a\tb", "\ud800", "a/b", "u:p@a"])
def test_the_address_of_a_router_names_a_host_that_can_be_dialled(host: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a router"):
        check_router_url(f"http://{host}:8000")
