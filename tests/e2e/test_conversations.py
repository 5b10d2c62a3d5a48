"""Tests conversations through the router as a client has them: streamed chats, each with the text
of earlier answers in its messages.

However the client changes that text, the answers are those of a single engine, and P fetches from D
only the common prefix of both prompts.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from tests.e2e.conftest import PATIENT
from tests.e2e.conversations import BLOCK, PULLED
from tests.e2e.harness import Cluster, Engine, assert_quiescent, metrics, new_session

pytestmark = pytest.mark.slow

BYTES = "kvferry:reuse_loaded_bytes_total"
REUSE = {**PATIENT, "bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
_rng = random.Random("chats")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Stage:
    p: Engine
    """A P without a prefix cache."""
    d: Engine
    router: Engine
    staged_router: Engine
    """The router in front of a P and a D that move KV through host buffers."""
    staged_p: Engine


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stage]:
    with Cluster(tmp_path_factory.mktemp("conversations"), model) as cluster:
        uncached = "--no-enable-prefix-caching"
        starting = [
            cluster.serve("prefill", uncached, extra=REUSE),
            cluster.serve("decode", extra=REUSE),
            cluster.serve("staged prefill", uncached, extra={**REUSE, "force_host_buffer": True}),
            cluster.serve("staged decode", extra={**REUSE, "force_host_buffer": True}),
        ]
        p, d, staged_p, staged_d = (process.ready() for process in starting)
        router, staged = cluster.proxy([p], [d]), cluster.proxy([staged_p], [staged_d])
        yield Stage(p, d, router.ready(), staged.ready(), staged_p)


def says(num_words: int = 12) -> str:
    return " ".join("".join(_rng.choice("abcdefghij") for _ in range(5)) for _ in range(num_words))


@dataclass(frozen=True)
class Turn:
    text: str
    num_prompt_tokens: int
    num_answer_tokens: int
    num_cached: int
    """Prompt tokens that P did not compute."""


async def chat(
    session: aiohttp.ClientSession, engine: Engine, messages: Messages, **more: Any
) -> Turn:
    body = {
        "messages": messages,
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    text = ""
    usage: dict[str, Any] = {}
    async with session.post(f"{engine.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        whole = await response.text()
    assert "ticket" not in whole, "what D tells the router is no client's"
    events = [
        line.removeprefix("data: ") for line in whole.splitlines() if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        usage = event.get("usage") or usage
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return Turn(
        text,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


async def pulled(session: aiohttp.ClientSession, p: Engine) -> tuple[int, int]:
    now = await metrics(session, p)
    return int(now.get(PULLED, 0)), int(now.get(BYTES, 0))


async def count_tokens(
    session: aiohttp.ClientSession, engine: Engine, messages: Messages
) -> list[int]:
    async with session.post(f"{engine.url}/tokenize", json={"messages": messages}) as response:
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


@pytest.mark.parametrize("kind", ["device", "host buffers"])
def test_six_turns_pull_what_p_lacks_and_answers_are_a_single_engines(
    stage: Stage, plain: Engine, kind: str
) -> None:
    router, p = (
        (stage.router, stage.p) if kind == "device" else (stage.staged_router, stage.staged_p)
    )

    async def check() -> None:
        async with new_session() as session:
            name, messages = (
                uuid4().hex,
                [{"role": "system", "content": says(30)}, {"role": "user", "content": says()}],
            )
            before, last = await pulled(session, p), None
            for _ in range(6):
                turn = await chat(session, router, messages, conversation_id=name)
                assert turn.text == (await chat(session, plain, messages)).text
                after = await pulled(session, p)
                tokens, num_bytes = after[0] - before[0], after[1] - before[1]
                if last is None:
                    assert (tokens, num_bytes) == (0, 0)
                else:
                    # All that D had of the last turn: everything except its last token and what the
                    # chat template puts after it.
                    assert (
                        last.num_prompt_tokens
                        <= tokens
                        <= last.num_prompt_tokens + last.num_answer_tokens
                    )
                    assert num_bytes % BLOCK == 0
                    assert num_bytes > 0
                before, last = after, turn
                messages = [
                    *messages,
                    {"role": "assistant", "content": turn.text},
                    {"role": "user", "content": says()},
                ]

    asyncio.run(check())


def strip_thinking(messages: Messages) -> Messages:
    """Remove the first half of each answer from the history, as clients of reasoning models strip
    the thinking.
    """
    return [
        {**m, "content": m["content"][len(m["content"]) // 2 :]} if m["role"] == "assistant" else m
        for m in messages
    ]


def edit(messages: Messages) -> Messages:
    """Change the last word of the first question, each time to another one."""
    return [
        {**m, "content": m["content"][:-5] + says(1)} if number == 1 else m
        for number, m in enumerate(messages)
    ]


def respace(messages: Messages) -> Messages:
    """Double the spaces in the answers: the same words, other tokens."""
    return [
        {**m, "content": "  ".join(m["content"].split(" "))} if m["role"] == "assistant" else m
        for m in messages
    ]


def other_system(messages: Messages) -> Messages:
    return [{"role": "system", "content": says(30)}, *messages[1:]]


@pytest.mark.parametrize("change", [strip_thinking, edit, respace, other_system])
def test_only_what_both_texts_have_in_common_is_pulled(
    stage: Stage, plain: Engine, change: Callable[[Messages], Messages]
) -> None:
    async def check() -> None:
        async with new_session() as session:
            name, messages = (
                uuid4().hex,
                [{"role": "system", "content": says(30)}, {"role": "user", "content": says()}],
            )
            known: list[int] = []
            for _ in range(6):
                before = await pulled(session, stage.p)
                turn = await chat(session, stage.router, messages, conversation_id=name)
                assert turn.text == (await chat(session, plain, messages)).text
                tokens = (await pulled(session, stage.p))[0] - before[0]
                now = await count_tokens(session, plain, messages)
                if known:
                    shared = common(known, now)
                    # P fetches whole blocks: the common part of the last block may be computed
                    # again.
                    assert shared // BLOCK * BLOCK <= tokens <= shared
                    assert tokens < len(known)
                known = [*now, *await count_tokens_of_answer(session, plain, messages, turn)]
                said = [
                    *messages,
                    {"role": "assistant", "content": turn.text},
                    {"role": "user", "content": says()},
                ]
                messages = change(said)

    asyncio.run(check())


async def count_tokens_of_answer(
    session: aiohttp.ClientSession, plain: Engine, messages: Messages, turn: Turn
) -> list[int]:
    """Return the answer's tokens that D computed: all but the last. Only these can be common to
    this turn and the next.
    """
    body = {
        "messages": messages,
        "max_tokens": turn.num_answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with session.post(f"{plain.url}/v1/chat/completions", json=body) as response:
        answer: list[int] = (await response.json())["choices"][0]["token_ids"]
        return answer[:-1]


def test_without_a_name_nothing_is_pulled(stage: Stage, plain: Engine) -> None:
    """The control: without a conversation id, P fetches nothing from D."""

    async def check() -> None:
        async with new_session() as session:
            messages = [{"role": "user", "content": says()}]
            before = await pulled(session, stage.p)
            for _ in range(3):
                turn = await chat(session, stage.router, messages)
                assert turn.text == (await chat(session, plain, messages)).text
                messages = [
                    *messages,
                    {"role": "assistant", "content": turn.text},
                    {"role": "user", "content": says()},
                ]
            assert await pulled(session, stage.p) == before
            await assert_quiescent(session, stage.p)

    asyncio.run(check())


def test_one_tenant_cannot_go_on_from_anothers_conversation(stage: Stage, plain: Engine) -> None:
    async def check() -> None:
        async with new_session() as session:
            name, messages = uuid4().hex, [{"role": "user", "content": says(40)}]
            one, other = ({"Authorization": f"Bearer {word}"} for word in ("one", "other"))
            body = {
                "messages": messages,
                "max_tokens": 8,
                "temperature": 0,
                "conversation_id": name,
            }
            for headers, is_pulled in ((one, False), (other, False), (one, True)):
                before = await pulled(session, stage.p)
                async with session.post(
                    f"{stage.router.url}/v1/chat/completions", json=body, headers=headers
                ) as response:
                    assert response.status == 200
                assert ((await pulled(session, stage.p))[0] > before[0]) is is_pulled

    asyncio.run(check())
