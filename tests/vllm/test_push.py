"""Tests push in real vLLM: both legs of a request start together behind kvferry's router, tokens
are right, and no block stays held, whichever client leaves at whatever moment.

One P, one D and one router, started as documented. Leases are so long that blocks which are free
soon were released, and prefills run in chunks.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.harness import (
    PREFILL_PARAMS,
    Answer,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_said,
    metrics,
    new_session,
    prefill,
    until,
)
from tests.ports import reserve_ports
from tests.vllm.abused_cluster import kill
from tests.vllm.documented import documented
from tests.vllm.fleet import Fleet, ready
from tests.vllm.right import BYTES_PER_TOKEN, CHATS, PROMPTS, Right, chat
from tests.vllm.test_routers import assert_serves_random_requests, start_vllm_router
from tests.vllm.vllm_asking import ONLY_THE_BEST, assert_free, stream

from kvferry.config import ClusterSecret
from kvferry.protocol.tickets import PushTicket, PushTicketKey

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PATIENT = {"kv_lease_duration": 600}
SOON_S = 100.0
CHUNKS = ("--max-num-batched-tokens", "256", "--max-num-seqs", "64")
FINISHED, FAILED = "kvferry:finished_loads_total", "kvferry:failed_loads_total"
MOVED = "vllm:nixl_bytes_transferred_sum"
PUSHED = ("kvferry:pushed_tokens_total", "kvferry:pushed_tokens_left_total")
AT_ONCE = "kvferry:router_legs_at_once_total"

_rng = random.Random(30)


@dataclass(frozen=True)
class Pushing:
    fleet: Fleet
    p: Engine
    d: Engine
    router: Engine
    _handovers: Iterator[int] = field(default_factory=count)

    async def ticket(self, session: aiohttp.ClientSession) -> str:
        """Return a push ticket for both legs of a request, made from P's own answer as a router
        does.
        """
        params = await prefill(session, self.p, fresh(1))
        # P gets its own parameters back and frees the blocks at once.
        assert (await ask(session, self.p, fresh(1), kv_transfer_params=params)).is_ok
        ticket = PushTicket(
            match_id=f"handover {next(self._handovers)} of a test",
            engine=params["remote_engine_id"],
            epoch=params["remote_epoch"],
            host=params["remote_host"],
            port=params["remote_port"],
            tp_size=params["tp_size"],
        )
        return PushTicketKey(
            ClusterSecret.load({"KVFERRY_SECRET": self.fleet.secret.decode()}).key
        ).sign(ticket)

    async def ask_p(self, session: aiohttp.ClientSession, prompt: Prompt, ticket: str) -> Answer:
        return await ask(
            session,
            self.p,
            prompt,
            max_tokens=1,
            kv_transfer_params={**PREFILL_PARAMS, "push_ticket": ticket},
        )

    async def ask_d(self, session: aiohttp.ClientSession, prompt: Prompt, ticket: str) -> Answer:
        return await ask(
            session,
            self.d,
            prompt,
            kv_transfer_params={"do_remote_prefill": True, "push_ticket": ticket},
        )

    async def waits(self, session: aiohttp.ClientSession) -> None:
        """Wait until D has blocks for a request and has registered at P."""

        async def is_waiting() -> bool:
            seen = await metrics(session, self.d)
            return (
                seen["kvferry:num_transfers"] == 1
                and seen["kvferry:num_peers"] > 0
                and seen["vllm:kv_cache_usage_perc"] > 0
            )

        await until("D waits for P", is_waiting)

    async def held(self, session: aiohttp.ClientSession) -> None:
        async def is_held() -> bool:
            return (await metrics(session, self.p))["kvferry:num_leases"] == 1

        await until("P holds blocks for D", is_held)


def fresh(length: int, max_tokens: int = 16) -> Prompt:
    """Return a prompt that no engine has seen."""
    return Prompt(tuple(_rng.randrange(10, 500) for _ in range(length)), max_tokens)


@pytest.fixture(scope="module")
def pushing(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pushing]:
    for_p, for_d = documented("Push")
    with Fleet(tmp_path_factory.mktemp("push"), model) as fleet:
        p = fleet.vllm("prefill", *CHUNKS, transfer=for_p.transfer, extra=PATIENT)
        d = fleet.vllm("decode", transfer=for_d.transfer, extra=PATIENT, cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Pushing(fleet, p, d, router)


def test_tokens_with_both_legs_at_once_equal_a_plain_vllms(right: Right, pushing: Pushing) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            # From this answer the router learns that P pushes.
            assert (await ask(session, pushing.router, fresh(20))).is_ok
            before, legs = (
                await metrics(session, pushing.d),
                (await metrics(session, pushing.router)).get(AT_ONCE, 0),
            )
            assert (
                await ask_all(pushing.router, PROMPTS, concurrency=8, timeout_s=240) == right.vllm
            )
            after = await metrics(session, pushing.d)
            assert (await metrics(session, pushing.router))[AT_ONCE] - legs == len(PROMPTS)
            # The KV did move: D has not computed these prompts.
            assert (
                after[MOVED] - before[MOVED]
                >= sum(len(prompt.token_ids) for prompt in PROMPTS) * BYTES_PER_TOKEN
            )
            assert after[FINISHED] - before[FINISHED] == len(PROMPTS)
            assert after[FAILED] == before[FAILED]
            # P computes 256 tokens per step, for several prompts; most tokens of long prompts had
            # moved when P computed the last chunk.
            pushed, left = (after[name] - before.get(name, 0) for name in PUSHED)
            assert 0 < left < pushed
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)

    asyncio.run(check())


def test_one_corrupted_block_in_transit_changes_the_tokens(right: Right, pushing: Pushing) -> None:
    """The negative control of the comparison above: it must see a wrong byte."""
    transfer = documented("Push")[1].transfer
    d = pushing.fleet.vllm(
        "corrupted decode",
        transfer=transfer,
        cores="1",
        environment={"KVFERRY_FAULTS": "corrupt:every=1"},
    )
    router = pushing.fleet.kvferry_router([pushing.p], [d])
    ready(d, router)
    chosen = [
        (prompt, answer)
        for prompt, answer in zip(PROMPTS, right.vllm, strict=True)
        if len(prompt.token_ids) < 200
    ][:8]

    async def check() -> list[Answer]:
        async with new_session(120) as session:
            assert (await ask(session, router, fresh(20))).is_ok
            answers = await ask_all(router, [prompt for prompt, _ in chosen], timeout_s=120)
            assert (await metrics(session, router))[AT_ONCE] == len(chosen)
            return answers

    try:
        answers = asyncio.run(check())
    finally:
        pushing.fleet.stop(router)
        pushing.fleet.stop(d)
    assert [answer.status for answer in answers] == [200] * len(chosen)
    assert all(
        answer.token_ids != plain.token_ids
        for answer, (_, plain) in zip(answers, chosen, strict=True)
    )


def test_chats_streams_and_choices_equal_a_plain_vllms(right: Right, pushing: Pushing) -> None:
    async def check() -> None:
        assert [await chat(pushing.router, text) for text in CHATS] == right.chats
        chosen = [
            pair for pair in zip(PROMPTS, right.vllm, strict=True) if len(pair[0].token_ids) > 300
        ][:4]
        async with new_session(120) as session:
            for prompt, answer in chosen:
                # The other salts keep D from using its prefix cache.
                assert (
                    await stream(session, pushing.router, prompt, cache_salt="streamed"),
                ) == answer.token_ids
                four = await ask(
                    session, pushing.router, prompt, n=4, cache_salt="four", **ONLY_THE_BEST
                )
                assert four.token_ids == answer.token_ids * 4, four.body
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)

    asyncio.run(check())


def test_engines_that_push_pull_behind_vllm_router(pushing: Pushing) -> None:
    """vllm-router would drop the ticket of a P whose answer says that it pushes."""
    router = start_vllm_router(pushing.fleet, pushing.p, pushing.d)
    ready(router)
    asyncio.run(assert_serves_random_requests(router, pushing.p, pushing.d, seed=30))
    pushing.fleet.stop(router)


@pytest.mark.exhaustive
def test_engines_that_list_each_other_in_peers_push_behind_vllm_router(
    tmp_path: Path, model: Path
) -> None:
    http_p, side_channel_p, http_d, side_channel_d = reserve_ports(4)
    transfer = documented("Push")[0].transfer
    with Fleet(tmp_path, model) as fleet:
        p, d = (
            fleet.vllm(
                name,
                transfer=transfer,
                extra={**PATIENT, "peers": [f"localhost:{peer}"]},
                ports=ports,
                cores=cores,
            )
            for name, ports, peer, cores in (
                ("prefill", (http_p, side_channel_p), side_channel_d, "0"),
                ("decode", (http_d, side_channel_d), side_channel_p, "1"),
            )
        )
        router = start_vllm_router(fleet, p, d)
        ready(p, d, router)

        async def check() -> None:
            await assert_serves_random_requests(router, p, d, seed=31)
            async with new_session() as session:
                assert (await metrics(session, d))[PUSHED[0]] > 0

        asyncio.run(check())


@pytest.mark.parametrize("first", ["p", "d"])
def test_whichever_leg_is_first_waits_for_the_other(pushing: Pushing, first: str) -> None:
    async def check() -> None:
        async with new_session() as session:
            ticket, prompt = await pushing.ticket(session), fresh(700)
            before = (await metrics(session, pushing.d))[MOVED]
            if first == "p":
                assert (await pushing.ask_p(session, prompt, ticket)).is_ok
                await pushing.held(session)
                answer = await pushing.ask_d(session, prompt, ticket)
            else:
                waiting = asyncio.create_task(pushing.ask_d(session, prompt, ticket))
                await pushing.waits(session)
                assert (await pushing.ask_p(session, prompt, ticket)).is_ok
                answer = await waiting
            assert answer == await ask(session, pushing.p, prompt), answer.body
            assert (await metrics(session, pushing.d))[MOVED] - before == 22 * 32 * BYTES_PER_TOKEN
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)

    asyncio.run(check())


@pytest.mark.parametrize("moment", ["before P comes", "before D comes", "in its stream"])
def test_a_client_that_leaves_frees_both_sides_long_before_the_lease_ends(
    pushing: Pushing, moment: str
) -> None:
    async def check() -> None:
        async with new_session() as session:
            prompt = fresh(700, max_tokens=500)
            if moment == "in its stream":
                async with session.post(
                    f"{pushing.router.url}/v1/completions", json={**prompt.body(), "stream": True}
                ) as response:
                    assert response.status == 200
                    await response.content.readline()
            else:
                ticket = await pushing.ticket(session)
                if moment == "before D comes":
                    assert (await pushing.ask_p(session, prompt, ticket)).is_ok
                    await pushing.held(session)
                await leave(session, pushing, prompt, ticket)
                if moment == "before P comes":
                    await assert_free(session, pushing.d, timeout_s=SOON_S)
                    assert (await pushing.ask_p(session, prompt, ticket)).is_ok
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)
            await assert_hands_over(session, pushing)

    asyncio.run(check())


async def leave(
    session: aiohttp.ClientSession, pushing: Pushing, prompt: Prompt, ticket: str
) -> None:
    """Send the decode leg, and disconnect once D has blocks for the request."""

    async def has_come() -> bool:
        seen = await metrics(session, pushing.d)
        return seen["vllm:kv_cache_usage_perc"] > 0

    asked = asyncio.create_task(pushing.ask_d(session, prompt, ticket))
    await until("D has blocks for the request", has_come)
    asked.cancel()
    await asyncio.wait({asked})


async def assert_hands_over(session: aiohttp.ClientSession, pushing: Pushing) -> None:
    prompt = fresh(100)
    before = (await metrics(session, pushing.d))[FINISHED]
    assert await ask(session, pushing.router, prompt) == await ask(session, pushing.p, prompt)
    assert (await metrics(session, pushing.d))[FINISHED] == before + 1


def test_clients_that_leave_at_any_moment_leave_nothing_behind(pushing: Pushing) -> None:
    """Thirty clients leave after up to one second, while as many others stay and get the right
    tokens.
    """
    staying, leaving = (
        [fresh(_rng.randrange(40, 900), 8) for _ in range(30)],
        [fresh(_rng.randrange(40, 900), 60) for _ in range(30)],
    )

    async def give_up(session: aiohttp.ClientSession, prompt: Prompt, after_s: float) -> None:
        try:
            async with asyncio.timeout(after_s):
                await ask(session, pushing.router, prompt)
        except TimeoutError:
            return

    async def check() -> None:
        async with new_session(240) as session:
            before = (await metrics(session, pushing.d))[FAILED]
            answers, *_ = await asyncio.gather(
                ask_all(pushing.router, staying, concurrency=4, timeout_s=240),
                *(give_up(session, prompt, index / 30) for index, prompt in enumerate(leaving)),
            )
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)
            assert answers == await ask_all(pushing.p, staying, concurrency=4, timeout_s=240)
            # The blocks that these requests left in D's prefix cache are right as well.
            assert await ask_all(pushing.d, leaving[::5], timeout_s=240) == await ask_all(
                pushing.p, leaving[::5], timeout_s=240
            )
            assert (await metrics(session, pushing.d))[FAILED] >= before
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)
            await assert_hands_over(session, pushing)

    asyncio.run(check())


def test_a_prefill_leg_that_ends_without_blocks_fails_the_decode_leg_at_once(
    pushing: Pushing,
) -> None:
    async def check() -> None:
        async with new_session() as session:
            ticket, prompt = await pushing.ticket(session), fresh(1500)
            waiting = asyncio.create_task(pushing.ask_d(session, prompt, ticket))
            await pushing.waits(session)
            body: dict[str, Any] = {
                "max_tokens": 400,
                "kv_transfer_params": {**PREFILL_PARAMS, "push_ticket": ticket},
                "stream": True,
            }
            async with session.post(
                f"{pushing.p.url}/v1/completions", json={**prompt.body(), **body}
            ) as response:
                await response.content.readline()
            answer = await waiting
            assert answer.status == 500, answer.body
            await assert_free(session, pushing.p, pushing.d, timeout_s=SOON_S)
            await assert_said(pushing.d, "the prefill leg ended as")
            await assert_hands_over(session, pushing)

    asyncio.run(check())


def test_a_prefill_engine_that_dies_fails_the_decode_leg_that_waits_for_it(
    pushing: Pushing,
) -> None:
    """This must be the last test in the file: P is dead afterwards."""

    async def check() -> None:
        async with new_session() as session:
            prompt = fresh(700)
            waiting = asyncio.create_task(
                pushing.ask_d(session, prompt, await pushing.ticket(session))
            )
            await pushing.waits(session)
            kill(pushing.p)
            answer = await waiting
            assert answer.status == 500, answer.body
            await assert_free(session, pushing.d, timeout_s=SOON_S)
            assert (await ask(session, pushing.d, prompt)).is_ok

    asyncio.run(check())
