"""Kills an engine of a pair in real vLLM while KV moves between P and D."""

import asyncio
from collections.abc import Sequence

import aiohttp
from tests.e2e.harness import Answer, Engine, Prompt, ask_all, metrics, until

__all__ = ["assert_right_or_error", "kill_while_kv_moves"]

FINISHED = "kvferry:finished_loads_total"


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


def assert_right_or_error(answers: Sequence[Answer], right: Sequence[Answer]) -> None:
    for answer, expected in zip(answers, right, strict=True):
        assert answer == expected or (answer.status >= 500 and answer.message), answer.body
