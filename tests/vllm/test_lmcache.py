"""Tests LMCacheMPConnector beside NixlConnector in kvferry's MultiConnector, in real vLLM: right
tokens, and serving that goes on while LMCache's server is killed, stopped or slow.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.harness import Answer, Engine, Prompt, ask_all, metrics, new_session, until
from tests.ports import reserve_port
from tests.vllm.fleet import LOOPBACK, START_S, Fleet, ready
from tests.vllm.lmcache_fleet import (
    CHUNK,
    LMCacheFleet,
    listening,
    shared_memory,
    skip_without_lmcache,
    transfer_beside,
)
from tests.vllm.right import PROMPTS, Right
from tests.vllm.vllm_asking import assert_free

from kvferry.errors import KVFerryError
from kvferry.types import Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""vLLM then serves the page that resets its prefix cache."""
HITS = "vllm:external_prefix_cache_hits_total"
TROUBLE = ("failures", "failed_loads", "slow_calls", "lookup_timeouts")
"""The counters of children, of which at least one must tell of a server that does not answer."""
FEW = [prompt for prompt in PROMPTS if len(prompt.token_ids) > 2 * CHUNK][:8]
"""Prompts that LMCache stores at least two chunks of. With a `cache_salt` they are new to it."""


@dataclass
class Beside:
    """P, which has LMCacheMPConnector as a child, D, a router, and LMCache's server."""

    fleet: LMCacheFleet
    p: Engine
    d: Engine
    router: Engine
    server: Engine


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Beside]:
    skip_without_lmcache()
    folders = tmp_path_factory.mktemp("lmcache"), tmp_path_factory.mktemp("others")
    with LMCacheFleet(folders[0], model) as fleet, Fleet(folders[1], model, fleet.secret) as others:
        server = fleet.lmcache_server()
        listening(server)
        p = fleet.vllm("prefill", transfer=transfer_beside(server.address), environment=DEV_MODE)
        d = others.vllm("decode", cores="1")
        router = others.kvferry_router([p], [d])
        ready(p, d, router)
        yield Beside(fleet, p, d, router, server)


async def forget(session: aiohttp.ClientSession, engine: Engine) -> None:
    """Drop vLLM's own prefix cache."""

    async def is_forgotten() -> bool:
        async with session.post(f"{engine.url}/reset_prefix_cache") as response:
            return response.status == 200

    await assert_free(session, engine)
    await until("the prefix cache is dropped", is_forgotten)


async def trouble(session: aiohttp.ClientSession, engine: Engine) -> float:
    found = await metrics(session, engine)
    assert not found.get("kvferry:child_disabled_total")
    return sum(found.get(f"kvferry:child_{name}_total", 0.0) for name in TROUBLE)


async def loaded_tokens(session: aiohttp.ClientSession, engine: Engine) -> float:
    return (await metrics(session, engine)).get(HITS, 0.0)


def expected(right: Right, prompts: list[Prompt]) -> list[Answer]:
    return [right.vllm[PROMPTS.index(prompt)] for prompt in prompts]


async def ask_twice(
    session: aiohttp.ClientSession, engine: Engine, salt: str
) -> tuple[list[Answer], float]:
    """Let the engine compute and forget FEW; the answers to the same again, and the number of
    tokens that were loaded for them.
    """
    await ask_all(engine, FEW, timeout_s=120, cache_salt=salt)
    await forget(session, engine)
    before = await loaded_tokens(session, engine)
    answers = await ask_all(engine, FEW, timeout_s=120, cache_salt=salt)
    return answers, await loaded_tokens(session, engine) - before


async def assert_loads_again(session: aiohttp.ClientSession, engine: Engine, right: Right) -> None:
    """Wait until LMCache's connector has found its server again."""
    salts = iter(range(1000))

    async def is_loaded() -> bool:
        answers, loaded = await ask_twice(session, engine, f"again {next(salts)}")
        assert answers == expected(right, FEW)
        return loaded > 0

    await until("KV comes from LMCache again", is_loaded, timeout_s=60)


def restart(beside: Beside) -> None:
    """Start LMCache's server, which has been killed, at the same address."""
    port = beside.server.address.port
    beside.fleet.stop(beside.server)
    beside.server = beside.fleet.lmcache_server(port)
    listening(beside.server)


def test_hundred_prompts_through_p_and_d_from_lmcache(beside: Beside, right: Right) -> None:
    async def check() -> None:
        async with new_session(240) as session:
            for expected_tokens in (0, sum(len(p.token_ids) // CHUNK * CHUNK for p in PROMPTS)):
                before = await loaded_tokens(session, beside.p)
                answers = await ask_all(beside.router, PROMPTS, concurrency=8, timeout_s=240)
                assert answers == right.vllm
                loaded = await loaded_tokens(session, beside.p) - before
                assert (loaded > 0.8 * expected_tokens) if expected_tokens else loaded == 0
                await forget(session, beside.p)
            await assert_free(session, beside.p, beside.d)

    asyncio.run(check())


def test_a_server_that_is_killed_costs_no_request_and_is_used_again_after_its_restart(
    beside: Beside, right: Right
) -> None:
    async def check() -> None:
        async with new_session(240) as session:
            await assert_loads_again(session, beside.p, right)
            before = await trouble(session, beside.p)
            asking = asyncio.create_task(
                ask_all(beside.router, PROMPTS, concurrency=8, timeout_s=240, cache_salt="killed")
            )
            await first_answers(session, beside.p)
            beside.server.kill()
            assert await asking == right.vllm
            assert await trouble(session, beside.p) > before
            await assert_free(session, beside.p, beside.d)
            restart(beside)
            await assert_loads_again(session, beside.p, right)

    asyncio.run(check())


@pytest.mark.exhaustive
def test_a_server_that_is_stopped_costs_no_request_and_is_used_again(
    beside: Beside, right: Right
) -> None:
    async def check() -> None:
        async with new_session(240) as session:
            before = await trouble(session, beside.p)
            asking = asyncio.create_task(
                ask_all(beside.router, PROMPTS, concurrency=8, timeout_s=240, cache_salt="stopped")
            )
            await first_answers(session, beside.p)
            beside.server.pause()
            try:
                assert await asking == right.vllm
                # A request that finds the server stopped.
                answers = await ask_all(beside.p, FEW[:2], cache_salt="still stopped")
                assert answers == expected(right, FEW[:2])
                assert await trouble(session, beside.p) > before
            finally:
                beside.server.resume()
            await assert_loads_again(session, beside.p, right)
            await assert_free(session, beside.p, beside.d)

    asyncio.run(check())


async def first_answers(session: aiohttp.ClientSession, engine: Engine) -> None:
    """Wait until the engine has computed some of the prompts that it is asked meanwhile."""
    before = (await metrics(session, engine))["vllm:prompt_tokens_total"]

    async def is_computing() -> bool:
        return (await metrics(session, engine))["vllm:prompt_tokens_total"] > before

    await until("some prompts are computed", is_computing)


@pytest.mark.exhaustive
def test_a_slow_server_costs_no_request(beside: Beside, right: Right) -> None:
    """The server runs for a tenth of the time."""

    async def slow_down(is_over: asyncio.Event) -> None:
        while not is_over.is_set():
            beside.server.pause()
            await asyncio.sleep(0.9)
            beside.server.resume()
            await asyncio.sleep(0.1)

    async def check() -> None:
        is_over = asyncio.Event()
        async with new_session(240) as session:
            slow = asyncio.create_task(slow_down(is_over))
            try:
                for _ in range(2):
                    answers = await ask_all(beside.p, FEW, timeout_s=240, cache_salt="slow")
                    assert answers == expected(right, FEW)
                    await forget(session, beside.p)
                assert await trouble(session, beside.p) > 0
            finally:
                is_over.set()
                await slow
            await assert_loads_again(session, beside.p, right)

    asyncio.run(check())


@pytest.mark.exhaustive
def test_a_new_engine_loads_what_a_killed_engine_stored(beside: Beside, right: Right) -> None:
    transfer = transfer_beside(beside.server.address)

    async def check(engine: Engine, is_new: bool) -> None:
        async with new_session(120) as session:
            before = await loaded_tokens(session, engine)
            answers = await ask_all(engine, FEW, timeout_s=120, cache_salt="of a killed engine")
            assert answers == expected(right, FEW)
            assert (await loaded_tokens(session, engine) > before) == is_new

    first = beside.fleet.vllm("first", transfer=transfer, cores="1")
    ready(first)
    asyncio.run(check(first, is_new=False))
    # Killed at once: LMCache keeps an engine alive whose API server has died.
    first.kill(is_stopped=True)
    second = beside.fleet.vllm("second", transfer=transfer, cores="1")
    ready(second)
    asyncio.run(check(second, is_new=True))
    beside.fleet.stop(second)


@pytest.mark.exhaustive
def test_without_a_server_vllm_stops_at_start_and_says_how_to_start_one(
    tmp_path: Path, model: Path
) -> None:
    skip_without_lmcache()
    with LMCacheFleet(tmp_path, model) as fleet:
        port = reserve_port()
        engine = fleet.vllm("alone", transfer=transfer_beside(Address(LOOPBACK, port)))
        with pytest.raises(KVFerryError):
            engine.process.wait(START_S)
        said = "\n".join(engine.process.tail(400))
    assert "Cannot reach the LMCache MP server" in said
    assert "lmcache server --l1-size-gb" in said


def test_damaged_kv_gives_other_tokens(beside: Beside, right: Right) -> None:
    """The control: what LMCache gives back is used; LMCache has no checksums. This is the last test
    here, because the server's memory stays damaged.
    """

    async def check() -> None:
        async with new_session(120) as session:
            await ask_all(beside.p, FEW, cache_salt="damaged")
            await forget(session, beside.p)
            noise, memory = os.urandom(1 << 20), shared_memory(beside.server.address)
            with memory.open("r+b") as file:
                for _ in range(memory.stat().st_size // len(noise)):
                    file.write(noise)
            before = await loaded_tokens(session, beside.p)
            answers = await ask_all(beside.p, FEW, cache_salt="damaged")
            assert answers != expected(right, FEW)
            assert await loaded_tokens(session, beside.p) > before

    asyncio.run(check())
