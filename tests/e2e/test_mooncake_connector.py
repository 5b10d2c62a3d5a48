"""Tests MooncakeConnector: the tokens are those of a single engine, whichever process is killed."""

import asyncio
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.e2e.conftest import PATIENT, SHORT, random_prompts
from tests.e2e.harness import (
    Cluster,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    until,
)
from tests.transports.mooncake_agents import AGENT, skip_without_mooncake

pytestmark = pytest.mark.slow

PROMPTS = random_prompts(100, seed=57)
LONG = [Prompt(tuple(range(first, first + 200))) for first in range(20, 60, 10)]
KILLER = struct.pack("<Q", 2) + b"[]"
"""A message that ends a process with a Transfer Engine."""


@pytest.fixture(scope="module", autouse=True)
def _mooncake() -> None:
    skip_without_mooncake()


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[Cluster, list[Engine]]]:
    """P, D and the router in front of them."""
    with Cluster(tmp_path_factory.mktemp("mooncake"), model) as cluster:
        starting = [
            cluster.serve(name, extra=PATIENT, connector="MooncakeConnector", policy="recompute")
            for name in ("prefill", "decode")
        ]
        engines = [process.ready() for process in starting]
        yield cluster, [*engines, cluster.proxy(engines[:1], engines[1:]).ready()]


async def until_kv_moves(session: aiohttp.ClientSession, router: Engine, decode: Engine) -> None:
    """Ask for prompts that D does not have until it has loaded one: the agents start when they are
    needed, which takes long on a busy machine, and meanwhile D computes the prompts.
    """
    before = (await metrics(session, decode)).get("kvferry:finished_loads_total", 0)
    asked = count(20)

    async def moves() -> bool:
        number = next(asked)
        fresh = Prompt((*LONG[0].token_ids[::-1], number % 400 + 20, number // 400 + 20))
        assert (await ask(session, router, fresh)).status == 200
        return (await metrics(session, decode))["kvferry:finished_loads_total"] > before

    await until("KV moves", moves, 120)


def agent_of(engine: Engine) -> psutil.Process:
    (agent,) = [
        member
        for member in engine.family()
        if member.status() != psutil.STATUS_ZOMBIE and AGENT in member.cmdline()
    ]
    return agent


def test_a_hundred_prompts_give_a_single_engines_tokens(
    pair: tuple[Cluster, list[Engine]], plain: Engine
) -> None:
    _, (prefill, decode, router) = pair

    async def check() -> None:
        async with new_session() as session:
            await until_kv_moves(session, router, decode)
            before = await metrics(session, decode)
            moved = await ask_all(router, PROMPTS, concurrency=16)
            assert [answer.status for answer in moved] == [200] * len(PROMPTS)
            assert moved == await ask_all(plain, PROMPTS)
            seen = await metrics(session, decode)
            finished, failed = (
                seen[f"kvferry:{kind}_loads_total"] - before.get(f"kvferry:{kind}_loads_total", 0)
                for kind in ("finished", "failed")
            )
            assert finished > len(PROMPTS) // 2
            assert failed == 0, decode.process.tail(50)
            await assert_quiescent(session, prefill, decode)

    asyncio.run(check())


@pytest.mark.parametrize("whose", ["P", "D", "P, by bytes at its port"])
def test_an_agent_that_is_killed_costs_no_token(
    pair: tuple[Cluster, list[Engine]], plain: Engine, whose: str
) -> None:
    """While the agent starts again, D computes the prompts; then their KV moves again."""
    _, (prefill, decode, router) = pair
    agent = agent_of(decode if whose == "D" else prefill)

    async def check() -> None:
        expected = await ask_all(plain, LONG)
        assert await ask_all(router, LONG) == expected
        if "bytes" in whose:
            send_to_mooncake(agent, KILLER)
        else:
            agent.send_signal(signal.SIGKILL)
        psutil.wait_procs([agent], 60)
        assert await ask_all(router, LONG) == expected
        async with new_session() as session:
            await until_kv_moves(session, router, decode)
            await assert_quiescent(session, prefill, decode)

    asyncio.run(check())


def send_to_mooncake(agent: psutil.Process, message: bytes) -> None:
    """Send to all ports of the agent: the test does not know which one is for handshakes, after
    which the agent refuses connections.
    """
    listening = [c.laddr.port for c in agent.net_connections("tcp") if c.status == "LISTEN"]
    for port in listening:
        with (
            suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", port), 5) as stranger,
        ):
            stranger.sendall(message)


@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_an_engine_that_is_killed_leaves_nothing_behind(
    cluster: Cluster, plain: Engine, whose: str
) -> None:
    """The killed engine's agent ends with it. The other engine frees its blocks and serves on."""
    starting = {
        name: cluster.serve(name, extra=SHORT, connector="MooncakeConnector", policy="recompute")
        for name in ("prefill", "decode")
    }
    engines = {name: process.ready() for name, process in starting.items()}
    router = cluster.proxy([engines["prefill"]], [engines["decode"]]).ready()
    (survivor,) = (engine for name, engine in engines.items() if name != whose)

    async def check() -> None:
        expected = await ask_all(plain, LONG)
        asking = asyncio.ensure_future(ask_all(router, LONG))
        async with new_session() as session:

            async def is_moving() -> bool:
                seen = await metrics(session, engines["decode"])
                return seen.get("kvferry:transfer_bytes_total", 0) > 0

            await until("KV moves", is_moving)
            engines[whose].kill()
            for answer, right in zip(await asking, expected, strict=True):
                assert answer.status != 200 or answer == right
            assert await ask_all(survivor, LONG) == expected
            await assert_quiescent(session, survivor)

    asyncio.run(check())


def test_one_corrupted_block_in_transit_changes_the_tokens(cluster: Cluster) -> None:
    """The negative control of everything above: the same comparison must see a wrong byte."""
    starting = [
        cluster.serve(name, connector="MooncakeConnector", environment=environment)
        for name, environment in (
            ("prefill", {}),
            ("decode", {"KVFERRY_FAULTS": "corrupt:every=1"}),
        )
    ]
    engines = [process.ready() for process in starting]
    router = cluster.proxy(engines[:1], engines[1:]).ready()

    async def check() -> None:
        moved, alone = await ask_all(router, LONG), await ask_all(engines[0], LONG)
        assert [answer.status for answer in moved] == [200] * len(LONG)
        assert all(a.token_ids != b.token_ids for a, b in zip(moved, alone, strict=True))

    asyncio.run(check())
