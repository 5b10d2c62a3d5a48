"""Kills an engine of a pair in real vLLM while KV moves between P and D."""

import asyncio
from collections.abc import Sequence

import aiohttp
from tests.e2e.harness import Answer, Engine, Prompt, ask, ask_all, metrics, prefill, until

FINISHED, FAILED = "kvferry:finished_loads_total", "kvferry:failed_loads_total"


async def kill_while_kv_moves(
    session: aiohttp.ClientSession,
    killed: Engine,
    d: Engine,
    router: Engine,
    prompts: Sequence[Prompt],
) -> list[Answer]:
    """Send prompts that D has not seen, and kill all processes of an engine at once when D has
    loaded the KV of the first.
    """
    before = (await metrics(session, d))[FINISHED]

    async def is_moving() -> bool:
        return (await metrics(session, d))[FINISHED] > before

    asking = asyncio.create_task(ask_all(router, prompts, concurrency=8, timeout_s=120))
    await until("KV moves", is_moving)
    assert not asking.done(), "the prompts are too few"
    killed.kill(is_stopped=True)
    return await asking


async def kill_p_while_d_reads(
    session: aiohttp.ClientSession, p: Engine, d: Engine, prompts: Sequence[Prompt]
) -> list[Answer]:
    """P computes the prompts and is stopped; D begins to read their KV; P is killed. No router ends
    the decode legs, so D itself must notice, and count each load as failed.
    """
    before = (await metrics(session, d))[FAILED]
    params = [await prefill(session, p, prompt) for prompt in prompts]
    p.pause()
    decoding = [
        asyncio.create_task(ask(session, d, prompt, kv_transfer_params=part))
        for prompt, part in zip(prompts, params, strict=True)
    ]

    async def is_reading() -> bool:
        return (await metrics(session, d))["kvferry:num_transfers"] > 0

    await until("D reads", is_reading)
    p.kill(is_stopped=True)
    answers = list(await asyncio.gather(*decoding))
    assert (await metrics(session, d))[FAILED] == before + len(prompts)
    return answers


def assert_right_or_error(answers: Sequence[Answer], right: Sequence[Answer]) -> None:
    for answer, expected in zip(answers, right, strict=True):
        assert answer == expected or (answer.status >= 500 and answer.message), answer.body
