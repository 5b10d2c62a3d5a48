"""The pull connector in real vLLM: right tokens, forged parameters refused, nothing left behind."""

import asyncio
import random

import aiohttp
import pytest
from tests.e2e.harness import Engine, Prompt, ask, ask_all, metrics, new_session, prefill, until
from tests.vllm.conftest import VllmPair

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


def prompts(count: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    lengths = [rng.choice([20, 31, 32, 33, 64, 100, 400, 1500]) for _ in range(count)]
    return [Prompt(tuple(rng.randrange(10, 500) for _ in range(length))) for length in lengths]


async def assert_free(session: aiohttp.ClientSession, *engines: Engine) -> None:
    async def is_free() -> bool:
        return all([(await metrics(session, engine))["vllm:kv_cache_usage_perc"] == 0 for engine in engines])

    await until("all KV blocks are free", is_free, timeout_s=60)


def test_greedy_tokens_through_prefill_and_decode_equal_a_single_engines(vllm_pair: VllmPair) -> None:
    asked = prompts(40, seed=1)

    async def check() -> None:
        moved = await ask_all(vllm_pair.router, asked, concurrency=8, timeout_s=180)
        assert [answer.status for answer in moved] == [200] * len(asked)
        assert moved == await ask_all(vllm_pair.p, asked, concurrency=8, timeout_s=180)
        async with new_session(60) as session:
            await assert_free(session, vllm_pair.p, vllm_pair.d)

    asyncio.run(check())


@pytest.mark.parametrize(
    "params", [{"do_remote_prefill": True}, {"do_remote_prefill": True, "ticket": "forged"}, {"do_remote_prefill": "yes"}]
)
def test_forged_parameters_are_an_error_and_the_next_request_works(vllm_pair: VllmPair, params: dict[str, object]) -> None:
    prompt = prompts(3, seed=2)[0]

    async def check() -> None:
        async with new_session(60) as session:
            assert not (await ask(session, vllm_pair.d, prompt, kv_transfer_params=params)).is_ok
            good = await prefill(session, vllm_pair.p, prompt)
            assert await ask(session, vllm_pair.d, prompt, kv_transfer_params=good) == await ask(session, vllm_pair.p, prompt)
            await assert_free(session, vllm_pair.p, vllm_pair.d)

    asyncio.run(check())
