"""Helpers for tests of faults: send both legs of a request without a router, and check how the
request ended.
"""

import random
from collections.abc import Iterable

import aiohttp
from tests.e2e.harness import Answer, Engine, Prompt, ask, metrics, prefill, until

FINISHED, FAILED = "kvferry:finished_loads_total", "kvferry:failed_loads_total"

_rng = random.Random("handovers")


def fresh(length: int = 100, max_tokens: int = 16) -> Prompt:
    """Return a prompt that no engine has seen: tests share engines and therefore prefix caches."""
    return Prompt(tuple(_rng.randrange(10, 500) for _ in range(length)), max_tokens)


async def count(session: aiohttp.ClientSession, engine: Engine, name: str) -> float:
    return (await metrics(session, engine)).get(name, 0.0)


async def is_free(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return await count(session, engine, "kvferry:num_used_blocks") == 0


async def is_loading(session: aiohttp.ClientSession, engines: Iterable[Engine]) -> bool:
    """True if each of these engines has a request that waits for remote KV."""
    return all(
        [
            await count(session, engine, "kvferry:num_requests_waiting_for_remote_kvs") > 0
            for engine in engines
        ]
    )


async def hand_over(session: aiohttp.ClientSession, p: Engine, d: Engine, prompt: Prompt) -> Answer:
    return await ask(session, d, prompt, kv_transfer_params=await prefill(session, p, prompt))


def assert_ended_well(answer: Answer, right: Answer, policy: str, *reasons: str) -> None:
    """Check a request whose pull could not succeed: D computed the right tokens, or answered with
    an error that gives one of these reasons.
    """
    if policy == "recompute":
        assert answer == right, answer.body
        return
    assert answer.status == 502, answer.body
    assert any(reason in answer.message for reason in reasons), answer.message


async def assert_recovers(
    session: aiohttp.ClientSession, p: Engine, d: Engine, plain: Engine
) -> None:
    """Check that KV is transferred again without any restart, and that every answer until then is
    right or an error.
    """

    async def comes_over() -> bool:
        prompt, before = fresh(), await count(session, d, FINISHED)
        answer = await hand_over(session, p, d, prompt)
        right = await ask(session, plain, prompt)
        assert not answer.is_ok or answer == right, (answer, right)
        return answer.is_ok and await count(session, d, FINISHED) > before

    await until("KV comes over again", comes_over)
