"""Right tokens through prefill and decode in real vLLM: against a plain vLLM, and against the embedded engine."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.e2e.harness import Answer, Prompt, ask, ask_all, metrics, new_session, post, prefill
from tests.vllm.conftest import Trio
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts, stream

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = random_prompts(100, seed=1)
CHATS = [{"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
         for text in ("Where does the ferry go?", "What is a lease, in two words, please? " * 20)]  # fmt: skip


@dataclass(frozen=True)
class Right:
    """What one vLLM answers that knows nothing of transfers, and what the embedded engine does."""

    vllm: list[Answer]
    chats: list[str]
    embedded: list[Answer]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Right]:
    async def chats() -> list[str]:
        async with new_session(120) as session:
            answers = [await post(session, plain, chat, "/v1/chat/completions") for chat in CHATS]
        return [answer.body["choices"][0]["message"]["content"] for answer in answers]

    with Fleet(tmp_path_factory.mktemp("right"), model) as fleet:
        plain, embedded = fleet.vllm("plain", transfer=None, cores="0-1"), fleet.embedded("embedded")
        ready(plain, embedded)
        right = Right(
            asyncio.run(ask_all(plain, PROMPTS, concurrency=8, timeout_s=240)),
            asyncio.run(chats()),
            asyncio.run(ask_all(embedded, PROMPTS, concurrency=8, timeout_s=240)),
        )
    yield right


def test_the_embedded_engine_and_vllm_give_equal_tokens_for_one_checkpoint(right: Right) -> None:
    assert [answer.status for answer in right.vllm] == [200] * len(PROMPTS)
    assert right.embedded == right.vllm


def test_tokens_through_prefill_and_decode_equal_a_plain_vllms(right: Right, trio: Trio) -> None:
    async def check() -> None:
        async with new_session(60) as session:
            before = (await metrics(session, trio.d))["vllm:nixl_bytes_transferred_sum"]
            moved = await ask_all(trio.router, PROMPTS, concurrency=8, timeout_s=240)
            assert moved == right.vllm
            after = await metrics(session, trio.d)
            # Not because nothing moved: 4 layers, 2 heads, K and V, 32 floats each, for every token but those D has by chance.
            assert after["vllm:nixl_bytes_transferred_sum"] - before > 0.9 * sum(len(p.token_ids) for p in PROMPTS) * 4 * 2 * 2 * 32 * 4
            assert after["kvferry:finished_pulls_total"] >= len(PROMPTS)
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())
