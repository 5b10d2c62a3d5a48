"""Death, pauses and departures: every request ends in right tokens or a clear error, and every block comes back."""

import asyncio
import random
import time

import aiohttp
import pytest
from tests.e2e.conftest import SHORT, Fleet, Pair, random_prompts
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    post,
    prefill,
    until,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DEADLINE_S = 15.0


async def used_blocks(session: aiohttp.ClientSession, engine: Engine) -> float:
    return (await metrics(session, engine))["kvferry:num_used_blocks"]


def test_blocks_come_back_when_the_decode_side_is_killed(fleet: Fleet) -> None:
    """D is busy, so that requests queue there and keep their leases alive by heartbeat, far beyond the first lease; then it dies."""
    p = fleet.p
    d = fleet.cluster.serve("doomed decode", "--max-num-seqs", "1", extra=SHORT).ready()

    async def check() -> None:
        async with new_session() as session:
            endless = [asyncio.create_task(ask(session, d, Prompt((11, 12, n), max_tokens=4000))) for n in range(13, 17)]
            await until("D is busy", lambda: _is_running(session, d))
            prompts = random_prompts(6, seed=11, longest=100)
            params = [await prefill(session, p, prompt) for prompt in prompts]
            held = await used_blocks(session, p)
            assert held > 0
            waiting = [
                asyncio.create_task(ask(session, d, prompt, kv_transfer_params=part)) for prompt, part in zip(prompts, params, strict=True)
            ]
            lease_s = SHORT["kv_lease_duration"]
            for _ in range(5):
                await asyncio.sleep(lease_s / 2)
                assert await used_blocks(session, p) == held
            assert not endless[-1].done(), "D was not busy for long enough for this test to show anything"
            d.kill()
            await asyncio.gather(*endless, return_exceptions=True)
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, aiohttp.ClientError)
            await assert_quiescent(session, p)
            assert (await ask(session, p, prompts[0])).is_ok

    asyncio.run(check())


async def _is_running(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return (await metrics(session, engine))["vllm:num_requests_running"] > 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_decode_side_survives_the_death_and_return_of_the_prefill_side(cluster: Cluster, plain: Engine, policy: str) -> None:
    """Traffic goes on while P is killed with -9 and started again at the same address, with the same engine id."""
    starting = [cluster.serve("prefill", extra=SHORT, policy=policy, engine_id="p"), cluster.serve("decode", extra=SHORT, policy=policy)]
    first, d = (process.ready() for process in starting)
    router = cluster.proxy([first], [d]).ready()
    prompts = [Prompt(tuple(random.Random(n).randrange(10, 500) for _ in range(100))) for n in range(60)]

    async def check() -> None:
        reference = {p.token_ids: a for p, a in zip(prompts, await ask_all(plain, prompts), strict=True)}
        outcomes: list[tuple[Prompt, Answer, float]] = []
        async with new_session() as session:

            async def client(share: list[Prompt]) -> None:
                for prompt in share:
                    since = time.monotonic()
                    answer = await ask(session, router, prompt)
                    outcomes.append((prompt, answer, time.monotonic() - since))

            clients = [asyncio.create_task(client(prompts[n:40:4])) for n in range(4)]
            await until("some traffic", lambda: _at_least(outcomes, 8))
            first.kill()
            second = cluster.serve("prefill again", extra=SHORT, policy=policy, engine_id="p", port=first.address.port).ready()
            await asyncio.gather(*clients)
            for prompt, answer, took_s in outcomes:
                assert took_s < DEADLINE_S
                assert answer == reference[prompt.token_ids] if answer.is_ok else answer.status in (502, 503)
            assert any(answer.is_ok for _, answer, _ in outcomes)

            async def is_back() -> bool:
                return (await ask(session, router, prompts[0])).is_ok

            await until("the new P is used", is_back)
            before = (await metrics(session, d))["kvferry:finished_pulls_total"]
            for prompt in prompts[40:]:
                assert await ask(session, router, prompt) == reference[prompt.token_ids]
            assert (await metrics(session, d))["kvferry:finished_pulls_total"] >= before + 20
            await assert_quiescent(session, second, d)

    asyncio.run(check())


async def _at_least(items: list[tuple[Prompt, Answer, float]], count: int) -> bool:
    return len(items) >= count


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_lease_that_ran_out_before_the_read_is_refused_never_read_wrong(fleet: Fleet, policy: str) -> None:
    """D is paused until P has given the blocks to other prompts."""
    p, d = fleet.p, fleet.strict if policy == "fail" else fleet.lenient

    async def check() -> None:
        async with new_session() as session:
            prompts = [Prompt(tuple(random.Random(f"{policy} {n}").randrange(10, 500) for _ in range(250))) for n in range(4)]
            before = (await metrics(session, d)).get("kvferry:failed_pulls_total", 0)
            # D knows P already, so that it could read at once when it wakes up.
            warm = Prompt(tuple(range(20, 60)))
            assert (await ask(session, d, warm, kv_transfer_params=await prefill(session, p, warm))).is_ok
            params = await prefill(session, p, prompts[0])
            d.pause()
            late = asyncio.create_task(ask(session, d, prompts[0], kv_transfer_params=params))
            await until("the lease has run out", lambda: _is_free(session, p))
            for prompt in prompts[1:]:
                assert (await ask(session, p, prompt)).is_ok
            d.resume()
            answer = await late
            if policy == "fail":
                assert answer.status == 502
                assert "lease" in answer.message or "lost" in answer.message
            else:
                assert answer == await ask(session, p, prompts[0])
            # Neither is D's prefix cache poisoned.
            assert await ask(session, d, prompts[0]) == await ask(session, p, prompts[0])
            assert (await metrics(session, d))["kvferry:failed_pulls_total"] == before + 1
            await assert_quiescent(session, p, d)

    asyncio.run(check())


async def _is_free(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return await used_blocks(session, engine) == 0


def test_a_client_that_leaves_at_any_moment_leaves_no_block_behind(patient: Pair) -> None:
    p, d, router = patient.p, patient.d, patient.router

    async def check() -> None:
        async with new_session() as session:
            rng = random.Random(7)
            for _ in range(25):
                prompt = Prompt(tuple(rng.randrange(10, 500) for _ in range(300)), max_tokens=64)
                task = asyncio.create_task(ask(session, router, prompt))
                await asyncio.sleep(rng.random() * 0.4)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            # The lease is 600 s: what is free soon was released, not expired.
            await assert_quiescent(session, p, d)
            assert (await ask(session, router, Prompt(tuple(range(10, 40))))).is_ok

    asyncio.run(check())


def test_a_ticket_that_nobody_uses_frees_its_blocks_when_the_lease_ends(fleet: Fleet) -> None:
    p = fleet.p

    async def check() -> None:
        async with new_session() as session:
            await assert_quiescent(session, p)
            before = (await metrics(session, p)).get("vllm:nixl_num_kv_expired_reqs_total", 0)
            await prefill(session, p, Prompt(tuple(range(10, 200))))
            assert await used_blocks(session, p) == 12
            await assert_quiescent(session, p)
            assert (await metrics(session, p))["vllm:nixl_num_kv_expired_reqs_total"] == before + 1

    asyncio.run(check())


def test_an_engine_given_its_own_ticket_computes_from_its_own_cache(patient: Pair) -> None:
    p = patient.p

    async def check() -> None:
        async with new_session() as session:
            prompt = Prompt(tuple(range(10, 200)))
            params = await prefill(session, p, prompt)
            assert await post(session, p, {**prompt.body(), "kv_transfer_params": params}) == await ask(session, p, prompt)
            await assert_quiescent(session, p)

    asyncio.run(check())
