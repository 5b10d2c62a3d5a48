"""Tests P2pNcclConnector with real engines over gloo: engines that register themselves with the
router give the tokens of a single engine, also after kill -9, and strangers change nothing.
"""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.e2e.conftest import SHORT, random_prompts
from tests.e2e.forgeries import knock
from tests.e2e.handovers import assert_ended_well, assert_recovers, count, fresh, is_loading
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    Starting,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    prefill,
    until,
)
from tests.e2e.push_legs import Legs, Shape, assert_all_ended_well, count_now

pytestmark = pytest.mark.slow

CONNECTOR = "P2pNcclConnector"
PROMPTS = random_prompts(100, seed=71, longest=600)
MOVED = "kvferry:transfer_bytes_total/dist"


@dataclass(frozen=True)
class Registered:
    """A router, and P and D that have registered with it."""

    send_type: str
    p: Engine
    d: Engine
    router: Engine


def serve(cluster: Cluster, role: str, router: Engine, **extra: Any) -> Starting:
    settings = {
        "proxy_ip": router.address.host,
        "proxy_port": str(router.address.port),
        "backend": "gloo",
        **extra,
    }
    kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
    return cluster.serve(
        role, "--kv-transfer-config.kv_role", kv_role, extra=settings, connector=CONNECTOR
    )


def empty_router(cluster: Cluster, directory: Path) -> Engine:
    config = directory / "router.toml"
    config.write_text("")
    return cluster.proxy([], [], "--config", str(config)).ready()


async def join(session: aiohttp.ClientSession, router: Engine) -> None:
    async def serves() -> bool:
        return (await ask(session, router, Prompt((11, 12, 13), max_tokens=1))).is_ok

    await until("both engines have registered", serves)


@pytest.fixture(
    scope="module",
    params=["GET", pytest.param("PUT", marks=pytest.mark.exhaustive), "PUT_ASYNC"],
)
def registered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Registered]:
    directory = tmp_path_factory.mktemp(request.param)
    with Cluster(directory, model) as cluster:
        router = empty_router(cluster, directory)
        starting = [
            serve(cluster, role, router, send_type=request.param) for role in ("prefill", "decode")
        ]
        p, d = (process.ready() for process in starting)
        yield Registered(request.param, p, d, router)


def test_tokens_equal_a_single_engines(registered: Registered, plain: Engine) -> None:
    p, d = registered.p, registered.d

    async def check() -> None:
        async with new_session() as session:
            await join(session, registered.router)
            answers = await ask_all(registered.router, PROMPTS)
            assert answers == await ask_all(plain, PROMPTS)
            assert all(answer.is_ok for answer in answers)
            # In push P writes into D's blocks, in pull D reads P's.
            mover = await metrics(session, d if registered.send_type == "GET" else p)
            loads = await metrics(session, d)
            assert mover[MOVED] > 0
            assert loads["kvferry:finished_loads_total"] > len(PROMPTS) // 2
            assert loads["kvferry:failed_loads_total"] == 0
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_strangers_on_every_port_change_no_token(registered: Registered, plain: Engine) -> None:
    """Among these ports are those of gloo, which has no authentication."""
    p, d = registered.p, registered.d
    prompts = [fresh(200) for _ in range(8)]

    async def check() -> None:
        async with new_session() as session:
            await join(session, registered.router)
            right = await ask_all(plain, prompts)
            ports = listening_ports(p) | listening_ports(d)
            assert len(ports) > 6, f"gloo listens on none of {ports}"
            with ExitStack() as stack:
                for port in ports:
                    for held in knock("127.0.0.1", port, 60):
                        stack.enter_context(held)
                answers = await ask_all(registered.router, prompts)
            assert [answer for answer in answers if answer.is_ok] == [
                expected for answer, expected in zip(answers, right, strict=True) if answer.is_ok
            ]
            await assert_recovers_through(session, registered.router, plain)
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_one_corrupted_block_in_transit_changes_the_tokens(cluster: Cluster) -> None:
    """The negative control: the comparison above sees a wrong byte."""
    faults = {"KVFERRY_FAULTS": "corrupt:every=1"}
    extra = {"send_type": "GET", "backend": "gloo"}
    starting = [
        cluster.serve("prefill", extra=extra, connector=CONNECTOR),
        cluster.serve("decode", extra=extra, connector=CONNECTOR, environment=faults),
    ]
    p, d = (process.ready() for process in starting)
    router = cluster.proxy([p], [d]).ready()
    prompts = [fresh(120) for _ in range(6)]

    async def check() -> None:
        moved, alone = await ask_all(router, prompts), await ask_all(p, prompts)
        assert all(answer.is_ok for answer in moved)
        assert all(a.token_ids != b.token_ids for a, b in zip(moved, alone, strict=True))
        async with new_session() as session:
            assert await count(session, d, MOVED) > 0

    asyncio.run(check())


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_killed_side_costs_errors_or_time_but_no_wrong_token(
    cluster: Cluster, plain: Engine, policy: str
) -> None:
    """P is killed while D reads; then D is killed while P holds blocks for it."""
    extra = {**SHORT, "send_type": "GET", "backend": "gloo"}
    starting = [
        cluster.serve(name, extra=extra, policy=policy, connector=CONNECTOR, engine_id=name)
        for name in ("prefill", "decode")
    ]
    p, d = (process.ready() for process in starting)

    async def check() -> None:
        async with new_session() as session:
            await assert_recovers(session, p, d, plain)
            assert (moved := await count(session, d, MOVED)) > 0
            prompts = [fresh(600) for _ in range(4)]
            right = await ask_all(plain, prompts)
            params = [await prefill(session, p, prompt) for prompt in prompts]
            p.pause()
            decoding = [
                asyncio.create_task(ask(session, d, prompt, kv_transfer_params=part))
                for prompt, part in zip(prompts, params, strict=True)
            ]
            await until("D reads", lambda: is_loading(session, [d]))
            p.kill(is_stopped=True)
            for answer, expected in zip(await asyncio.gather(*decoding), right, strict=True):
                assert_ended_well(answer, expected, policy, "was lost", "over dist")
            await assert_quiescent(session, d)
            cluster.dismiss(p.process)
            again = cluster.serve("prefill", extra=extra, connector=CONNECTOR, engine_id="prefill")
            successor = again.ready()
            await assert_recovers(session, successor, d, plain)
            assert await count(session, d, MOVED) > moved
            await prefill(session, successor, fresh(600))
            d.kill()
            await assert_quiescent(session, successor)
            assert (await ask(session, successor, prompts[0])) == right[0]

    asyncio.run(check())


@pytest.mark.parametrize(
    "send_type", [pytest.param("PUT", marks=pytest.mark.exhaustive), "PUT_ASYNC"]
)
def test_a_side_that_is_killed_during_a_push_costs_no_wrong_token(
    tmp_path: Path, model: Path, plain: Engine, send_type: str
) -> None:
    """P is killed while it writes to two D; then one D is killed while P's successor writes."""
    extra = {
        **SHORT,
        "push_registration_timeout": 10,
        "send_type": send_type,
        "backend": "gloo",
    }
    shape = Shape(extra, ("--max-num-batched-tokens", "16"), connector=CONNECTOR)

    async def check(legs: Legs) -> None:
        async with new_session() as session:
            prompt = fresh(1500)
            right = await ask(session, plain, prompt)
            prefilling, decoding = await begin_push(session, legs, prompt)
            legs.p.kill()
            await asyncio.gather(prefilling, return_exceptions=True)
            await assert_all_ended_well(decoding, right, "no longer answers", "was lost")
            await assert_quiescent(session, *legs.decoders.values())

            await legs.replace_p()
            for d in legs.decoders.values():
                await legs.assert_recovers(session, d, plain)
            prompt = fresh(1500)
            right = await ask(session, plain, prompt)
            prefilling, decoding = await begin_push(session, legs, prompt)
            legs.decoders["fail"].kill()
            assert (await prefilling).is_ok
            assert await decoding["recompute"] == right
            await asyncio.gather(*decoding.values(), return_exceptions=True)
            await assert_quiescent(session, legs.p, legs.decoders["recompute"])
            assert await ask(session, legs.p, prompt) == right

    with Legs.opened(tmp_path, model, shape) as legs:
        asyncio.run(check(legs))


async def begin_push(
    session: aiohttp.ClientSession, legs: Legs, prompt: Prompt
) -> "tuple[asyncio.Task[Answer], dict[str, asyncio.Task[Answer]]]":
    """Start a prefill and a decode leg at each D, and wait until P has written some blocks."""
    ticket, before = legs.ticket(), await count_now(session, legs.p, MOVED)
    decoding = legs.decode_legs(session, prompt, ticket)
    await legs.until_registered(session, len(decoding))
    prefilling = asyncio.create_task(legs.prefill_leg(session, prompt, ticket))

    async def has_begun() -> bool:
        return await count(session, legs.p, MOVED) > before

    await until("P writes", has_begun)
    assert not prefilling.done(), "the prompt is too short"
    return prefilling, decoding


def listening_ports(engine: Engine) -> set[int]:
    return {
        connection.laddr.port
        for process in engine.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


async def assert_recovers_through(
    session: aiohttp.ClientSession, router: Engine, plain: Engine
) -> None:
    async def is_right() -> bool:
        prompt = fresh(150)
        answer, right = await ask(session, router, prompt), await ask(session, plain, prompt)
        assert not answer.is_ok or answer == right
        return answer.is_ok

    await until("the router answers again", is_right)
