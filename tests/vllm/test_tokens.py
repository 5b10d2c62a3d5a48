"""Tests right tokens through P and D in real vLLM, compared with a vLLM without a connector and
with the embedded engine.
"""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.e2e.harness import Prompt, ask, ask_all, metrics, new_session
from tests.vllm.conftest import Trio
from tests.vllm.fleet import ready
from tests.vllm.right import BYTES_PER_TOKEN, CHATS, PROMPTS, Right, chat
from tests.vllm.vllm_asking import assert_free, stream

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_embedded_engine_and_vllm_give_equal_tokens_for_one_checkpoint(right: Right) -> None:
    assert [answer.status for answer in right.vllm] == [200] * len(PROMPTS)
    assert right.embedded == right.vllm


def test_tokens_through_prefill_and_decode_equal_a_plain_vllms(right: Right, trio: Trio) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            before = await metrics(session, trio.d)
            assert await ask_all(trio.router, PROMPTS, concurrency=8, timeout_s=240) == right.vllm
            after = await metrics(session, trio.d)
            # The KV did move: D has not computed these prompts.
            moved = (
                after["vllm:nixl_bytes_transferred_sum"] - before["vllm:nixl_bytes_transferred_sum"]
            )
            assert moved >= sum(len(prompt.token_ids) for prompt in PROMPTS) * BYTES_PER_TOKEN
            assert after["kvferry:finished_loads_total"] - before[
                "kvferry:finished_loads_total"
            ] == len(PROMPTS)
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


def test_chat_and_streaming_equal_a_plain_vllms(right: Right, trio: Trio) -> None:
    async def check() -> None:
        assert [await chat(trio.router, text) for text in CHATS] == right.chats
        async with new_session(120) as session:
            for prompt, answer in list(zip(PROMPTS, right.vllm, strict=True))[:8]:
                # The other salt keeps D from using its prefix cache.
                assert (
                    await stream(session, trio.router, prompt, cache_salt="streamed"),
                ) == answer.token_ids
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


def test_four_choices_read_one_ticket_once(right: Right, trio: Trio) -> None:
    # vLLM refuses several choices at temperature 0; `top_k=1` gives the same tokens.
    chosen = [
        (prompt, answer)
        for prompt, answer in zip(PROMPTS, right.vllm, strict=True)
        if len(prompt.token_ids) > 300
    ][:6]
    fours: list[dict[str, Any]] = [
        {"n": 4, "temperature": 1.0, "top_k": 1, "cache_salt": f"salt {number}"}
        for number in range(len(chosen))
    ]

    async def check() -> None:
        async with new_session(120) as session:
            before = (await metrics(session, trio.d))["vllm:nixl_bytes_transferred_sum"]
            asked = [
                ask(session, trio.router, prompt, **four)
                for (prompt, _), four in zip(chosen, fours, strict=True)
            ]
            for answer, (_, one) in zip(await asyncio.gather(*asked), chosen, strict=True):
                assert answer.token_ids == one.token_ids * 4, answer.body
            moved = (await metrics(session, trio.d))["vllm:nixl_bytes_transferred_sum"] - before
            whole_blocks = (
                sum(-(-len(prompt.token_ids) // 32) * 32 for prompt, _ in chosen) * BYTES_PER_TOKEN
            )
            assert moved == whole_blocks
            hot = await ask(session, trio.router, replace(chosen[0][0], temperature=1.0, n=4))
            assert len(set(hot.token_ids)) > 1, hot.body
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


def test_one_corrupted_block_in_transit_changes_the_tokens(right: Right, trio: Trio) -> None:
    """The negative control of everything above: the same comparison must see a wrong byte."""
    d = trio.fleet.vllm(
        "corrupted decode", cores="1", environment={"KVFERRY_FAULTS": "corrupt:every=1"}
    )
    router = trio.fleet.kvferry_router([trio.p], [d])
    ready(d, router)
    chosen = [
        (Prompt(prompt.token_ids), answer)
        for prompt, answer in zip(PROMPTS, right.vllm, strict=True)
        if len(prompt.token_ids) < 200
    ][:8]
    try:
        answers = asyncio.run(ask_all(router, [prompt for prompt, _ in chosen], timeout_s=120))
    finally:
        trio.fleet.stop(router)
        trio.fleet.stop(d)
    assert [answer.status for answer in answers] == [200] * len(chosen)
    assert all(
        answer.token_ids != plain.token_ids
        for answer, (_, plain) in zip(answers, chosen, strict=True)
    )
