"""Prompts, and the answers of a vLLM without a connector: computed once for all tests that compare
with them.
"""

import asyncio
from dataclasses import dataclass

from tests.e2e.harness import Answer, Engine, ask_all, new_session, post
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import random_prompts

PROMPTS = random_prompts(100, seed=1)
CHATS = ["Where does the transfer worker go?", "What is a lease, in two words, please? " * 20]
BYTES_PER_TOKEN = 4 * 2 * 2 * 64 * 4
"""For the generated model: layers, KV heads, K and V, head size, float32."""


@dataclass(frozen=True)
class Right:
    """The answers of a vLLM without a connector, and those of the embedded engine."""

    vllm: list[Answer]
    chats: list[str]
    embedded: list[Answer]


def ask_plain(fleet: Fleet) -> Right:
    plain, embedded = fleet.vllm("plain", transfer=None, cores="0-1"), fleet.embedded("embedded")
    ready(plain, embedded)
    return Right(
        asyncio.run(ask_all(plain, PROMPTS, concurrency=8, timeout_s=240)),
        [asyncio.run(chat(plain, text)) for text in CHATS],
        asyncio.run(ask_all(embedded, PROMPTS, concurrency=8, timeout_s=240)),
    )


async def chat(engine: Engine, text: str) -> str:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
    }
    async with new_session(120) as session:
        answer = await post(session, engine, body, "/v1/chat/completions")
    assert answer.is_ok, answer.body
    return str(answer.body["choices"][0]["message"]["content"])
