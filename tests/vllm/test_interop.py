"""Tests KV between kvferry and vLLM's own NixlConnector, in both directions and behind two routers:
tokens are right, and all blocks are free afterwards. See docs/interop.md.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.harness import Engine, Prompt, ask, ask_all, metrics, new_session, prefill, until
from tests.ports import reserve_ports
from tests.vllm.abused_cluster import kill
from tests.vllm.documented import documented
from tests.vllm.fleet import Fleet, ready
from tests.vllm.right import BYTES_PER_TOKEN, PROMPTS, Right
from tests.vllm.test_routers import start_vllm_router
from tests.vllm.vllm_asking import ONLY_THE_BEST, assert_free, stream

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_S = 12
STOCK_TRANSFER = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
BLOCK_TOKENS = 32
MOVED = "vllm:nixl_bytes_transferred_sum"
HITS = ((1, 1), (31, 1), (32, 1), (33, 1), (64, 1), (64, 1), (70, 1), (200, 5), (230, 2))
"""Lengths of prompts that continue each other, and how many blocks D lacks. vLLM never takes the
block of a prompt's last token from its prefix cache, so a repeated prompt moves its last block.
"""


@dataclass(frozen=True)
class Mixed:
    """A stock vLLM and one with kvferry, each able to be P or D."""

    fleet: Fleet
    stock: Engine
    ours: Engine

    def sides(self, direction: str) -> tuple[Engine, Engine]:
        """P and D."""
        return (self.stock, self.ours) if direction == "from stock" else (self.ours, self.stock)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Mixed]:
    with Fleet(tmp_path_factory.mktemp("mixed"), model) as fleet:
        http, side_channel = reserve_ports(2)
        lease = {"kv_lease_duration": LEASE_S}
        stock = fleet.vllm(
            "stock", transfer=STOCK_TRANSFER, extra=lease, ports=(http, side_channel)
        )
        [command] = documented("How to turn it on", "interop.md")
        peers = {"peers": [f"localhost:{side_channel}"]}
        ours = fleet.vllm("ours", transfer=command.transfer, extra={**lease, **peers}, cores="1")
        ready(stock, ours)
        yield Mixed(fleet, stock, ours)


DIRECTIONS = ("from stock", "to stock")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((direction, name), marks=marks, id=f"{direction} {name}")
        for direction in DIRECTIONS
        for name, marks in (("kvferry", ()), ("vllm-router", pytest.mark.exhaustive))
    ],
)
def routed(
    request: pytest.FixtureRequest, mixed: Mixed
) -> Iterator[tuple[str, Engine, Engine, Engine]]:
    """A name that is unique to the direction and the router, P, D and the router."""
    direction, name = request.param
    p, d = mixed.sides(direction)
    router = (
        mixed.fleet.kvferry_router([p], [d])
        if name == "kvferry"
        else start_vllm_router(mixed.fleet, p, d)
    )
    ready(router)
    yield f"{direction} {name}", p, d, router
    mixed.fleet.stop(router)


async def moved_blocks(session: aiohttp.ClientSession, engine: Engine) -> float:
    return (await metrics(session, engine)).get(MOVED, 0) / (BLOCK_TOKENS * BYTES_PER_TOKEN)


def num_blocks(prompts: list[Prompt]) -> int:
    return sum(-(-len(prompt.token_ids) // BLOCK_TOKENS) for prompt in prompts)


def fresh(length: int, about: str, **changes: Any) -> Prompt:
    rng = random.Random(about)
    return Prompt(tuple(rng.randrange(10, 500) for _ in range(length)), **changes)


def test_forty_prompts_give_the_tokens_of_a_plain_vllm(
    right: Right, routed: tuple[str, Engine, Engine, Engine]
) -> None:
    name, p, d, router = routed

    async def check() -> None:
        async with new_session(60) as session:
            before = await moved_blocks(session, d)
            # The salt keeps D from using its prefix cache.
            answers = await ask_all(
                router, PROMPTS[:40], concurrency=8, timeout_s=240, cache_salt=name
            )
            assert answers == right.vllm[:40]
            # The KV did move: D has not computed these prompts.
            assert await moved_blocks(session, d) - before == num_blocks(PROMPTS[:40])
            await assert_free(session, p, d)

    asyncio.run(check())


def test_short_prompts_hits_streams_and_choices(
    routed: tuple[str, Engine, Engine, Engine],
) -> None:
    name, p, d, router = routed

    async def check() -> None:
        async with new_session(60) as session:
            whole = fresh(230, name)
            for length, num_missing in HITS:
                prompt = Prompt(whole.token_ids[:length])
                before = await moved_blocks(session, d)
                answer = await ask(session, router, prompt)
                assert answer.is_ok, answer.body
                assert await moved_blocks(session, d) - before == num_missing, length
                assert answer == await ask(session, p, prompt, cache_salt="direct"), length
            streamed = fresh(150, f"{name} stream", max_tokens=24)
            tokens = await stream(session, router, streamed)
            assert (tokens,) == (await ask(session, p, streamed)).token_ids
            four = fresh(300, f"{name} choices")
            answer = await ask(session, router, four, n=4, **ONLY_THE_BEST)
            assert answer.is_ok, answer.body
            assert answer.token_ids == (await ask(session, p, four)).token_ids * 4
            await assert_free(session, p, d)

    asyncio.run(check())


def test_decode_legs_that_never_come_free_p_when_the_lease_expires(mixed: Mixed) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            for engine in (mixed.stock, mixed.ours):
                await prefill(session, engine, fresh(300, "lost"))
                assert (await metrics(session, engine))["vllm:kv_cache_usage_perc"] > 0
            await assert_free(session, mixed.stock, mixed.ours, timeout_s=LEASE_S + 30)

    asyncio.run(check())


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_aborted_decode_legs_free_both_sides_before_the_lease_expires(
    mixed: Mixed, direction: str, state: str
) -> None:
    """A leg is aborted while D decodes, or while D loads from a P that is paused."""
    p, d = mixed.sides(direction)

    async def check() -> None:
        async with new_session(60) as session:

            async def is_in_state() -> bool:
                return (await metrics(session, d))[f"vllm:num_requests_{state}"] > 0

            for number in range(1, 4):
                prompt = fresh(900, f"{direction} {state} {number}", max_tokens=1000)
                since = time.monotonic()
                params = await prefill(session, p, prompt)
                assert (await metrics(session, p))["vllm:kv_cache_usage_perc"] > 0
                with paused(p) if state == "waiting" else nullcontext():
                    asking = asyncio.create_task(ask(session, d, prompt, kv_transfer_params=params))
                    await until(f"the request at D is {state}", is_in_state)
                    asking.cancel()
                    await asyncio.wait({asking})
                left_s = since + LEASE_S - time.monotonic()
                await assert_free(session, p, d, timeout_s=left_s - 2)

    asyncio.run(check())


@contextmanager
def paused(engine: Engine) -> Iterator[None]:
    engine.pause()
    try:
        yield
    finally:
        engine.resume()


def test_a_killed_stock_engine_costs_its_requests_and_no_block(mixed: Mixed) -> None:
    """The last test of this module: it kills the stock engine, as D of one request and as P of
    another.
    """

    async def check() -> None:
        async with new_session(60) as session:
            to_stock = fresh(300, "to the killed", max_tokens=1500)
            params = await prefill(session, mixed.ours, to_stock)
            asking = asyncio.create_task(
                ask(session, mixed.stock, to_stock, kv_transfer_params=params)
            )
            from_stock = fresh(300, "from the killed")
            lost = await prefill(session, mixed.stock, from_stock)
            # No D will ask for this one.
            kept = await prefill(session, mixed.ours, fresh(200, "for the killed"))
            assert kept["remote_engine_id"] == params["remote_engine_id"]
            await asyncio.to_thread(kill, mixed.stock)
            with pytest.raises(aiohttp.ClientError):
                await asking
            answer = await ask(session, mixed.ours, from_stock, kv_transfer_params=lost)
            assert not answer.is_ok, answer.body
            await assert_free(session, mixed.ours, timeout_s=LEASE_S + 30)
            assert (await ask(session, mixed.ours, from_stock)).is_ok

    asyncio.run(check())
