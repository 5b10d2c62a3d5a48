"""Tests P and D in separate processes over each transport: the tokens are those of a single engine.
A control must differ.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import random_prompts
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
)

pytestmark = pytest.mark.slow

GREEDY = random_prompts(200, seed=1)
SAMPLED = [
    replace(prompt, temperature=0.8, seed=number, max_tokens=24)
    for number, prompt in enumerate(random_prompts(40, seed=2, longest=300))
]


CHATS: list[dict[str, Any]] = [
    {},
    {"stop": ["e"]},
    {"logprobs": True, "top_logprobs": 3},
    {"n": 2, "seed": 3},
]


@pytest.fixture(scope="module")
def expected(plain: Engine, pytestconfig: pytest.Config) -> dict[str, list[Answer]]:
    """The answers of a single engine without a connector: to 40 greedy prompts, or to all of
    them.
    """
    greedy = GREEDY if pytestconfig.getoption("--exhaustive") else GREEDY[:40]
    return {
        "greedy": asyncio.run(ask_all(plain, greedy)),
        "sampled": asyncio.run(ask_all(plain, SAMPLED)),
    }


@pytest.fixture(scope="module", params=["shm", "nixl", "tcp"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[tuple[str, list[Engine]]]:
    """P, D and the router in front of them, over one transport."""
    transport: str = request.param
    with Cluster(tmp_path_factory.mktemp(transport), model) as cluster:
        starting = [
            cluster.serve(name, extra={"transports": [transport]}) for name in ("prefill", "decode")
        ]
        engines = [process.ready() for process in starting]
        yield transport, [*engines, cluster.proxy(engines[:1], engines[1:]).ready()]


def test_greedy_tokens_equal_a_single_engines(
    pair: tuple[str, list[Engine]], expected: dict[str, list[Answer]]
) -> None:
    """40 prompts over each transport; `make test-all` sends 200 over NIXL, which carries KV between
    hosts.
    """
    transport, (prefill, decode, router) = pair
    prompts = GREEDY[: len(expected["greedy"])] if transport == "nixl" else GREEDY[:40]
    answers = asyncio.run(ask_all(router, prompts, concurrency=16))
    assert [answer.status for answer in answers] == [200] * len(prompts)
    assert answers == expected["greedy"][: len(prompts)]

    async def check() -> None:
        async with new_session() as session:
            seen = await metrics(session, decode)
            assert seen[f"kvferry:transfer_bytes_total/{transport}"] > 0
            assert seen["kvferry:finished_loads_total"] > len(prompts) // 2
            assert seen["kvferry:failed_loads_total"] == 0
            await assert_quiescent(session, prefill, decode)

    asyncio.run(check())


def test_sampled_tokens_with_a_seed_equal_a_single_engines(
    pair: tuple[str, list[Engine]], expected: dict[str, list[Answer]]
) -> None:
    _, (_, _, router) = pair
    answers = asyncio.run(ask_all(router, SAMPLED))
    assert answers == expected["sampled"]
    assert len({answer.token_ids for answer in answers}) > 30


def test_several_choices_share_one_prefill(pair: tuple[str, list[Engine]]) -> None:
    _, (prefill, decode, router) = pair
    prompt = Prompt(tuple(range(20, 220)), n=4, temperature=0.9, seed=5)

    async def check() -> None:
        async with new_session() as session:
            answer = await ask(session, router, prompt)
            plain = await ask(session, prefill, prompt)
            assert answer == plain
            assert len(set(answer.token_ids)) == 4
            await assert_quiescent(session, prefill, decode)

    asyncio.run(check())


def test_a_stream_brings_the_same_tokens(pair: tuple[str, list[Engine]]) -> None:
    _, (_, _, router) = pair
    prompt = Prompt(tuple(range(30, 130)))

    async def check() -> None:
        async with new_session() as session:
            whole = await ask(session, router, prompt)
            assert await streamed_tokens(session, router, prompt) == whole.token_ids[0]

    asyncio.run(check())


def test_chats_with_stop_strings_and_logprobs_equal_a_single_engines(
    pair: tuple[str, list[Engine]], plain: Engine
) -> None:
    _, (prefill, decode, router) = pair

    async def check() -> None:
        async with new_session() as session:
            for number, changes in enumerate(CHATS):
                words = f"Tell me of ferry number {number} and of the river it crosses. " * 4
                body = {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": words}],
                    "max_tokens": 24,
                    "temperature": 0.0,
                    **changes,
                }
                moved = (await post(session, router, body, "/v1/chat/completions")).body
                alone = (await post(session, plain, body, "/v1/chat/completions")).body
                assert [without_noise(choice) for choice in moved["choices"]] == [
                    without_noise(choice) for choice in alone["choices"]
                ]
                assert moved["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
            await assert_quiescent(session, prefill, decode)

    asyncio.run(check())


def without_noise(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with its logprobs rounded: they are float64 results of differently batched
    sums.
    """
    content = (choice.get("logprobs") or {}).get("content") or []
    rounded = [
        (part["token"], round(part["logprob"], 6), [top["token"] for top in part["top_logprobs"]])
        for part in content
    ]
    return {**choice, "logprobs": rounded}


async def streamed_tokens(
    session: aiohttp.ClientSession, engine: Engine, prompt: Prompt
) -> tuple[int, ...]:
    tokens: list[int] = []
    async with session.post(
        f"{engine.url}/v1/completions", json={**prompt.body(), "stream": True}
    ) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                tokens += json.loads(text)["choices"][0]["token_ids"] or []
    return tuple(tokens)


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
def test_one_corrupted_block_in_transit_changes_the_tokens(
    cluster: Cluster, transport: str
) -> None:
    """The negative control of everything above: the same comparison must see a wrong byte."""
    prefill = cluster.serve("prefill", extra={"transports": [transport]})
    decode = cluster.serve(
        "decode",
        extra={"transports": [transport]},
        environment={"KVFERRY_FAULTS": "corrupt:every=1"},
    )
    engines = [prefill.ready(), decode.ready()]
    router = cluster.proxy(engines[:1], engines[1:]).ready()
    prompts = random_prompts(8, seed=3, longest=200)[2:]
    prompts = [Prompt(prompt.token_ids + tuple(range(100, 120))) for prompt in prompts]

    async def check() -> None:
        moved = await ask_all(router, prompts)
        plain = await ask_all(engines[0], prompts)
        assert [answer.status for answer in moved] == [200] * len(prompts)
        assert all(a.token_ids != b.token_ids for a, b in zip(moved, plain, strict=True))

    asyncio.run(check())


def test_two_ranks_on_each_side_give_a_single_ranks_tokens(cluster: Cluster, plain: Engine) -> None:
    starting = [
        cluster.serve(name, "--tensor-parallel-size", "2") for name in ("prefill", "decode")
    ]
    engines = [process.ready() for process in starting]
    router = cluster.proxy(engines[:1], engines[1:]).ready()
    prompts = random_prompts(12, seed=4, longest=200)

    async def check() -> None:
        assert await ask_all(router, prompts) == await ask_all(plain, prompts)
        async with new_session() as session:
            assert (await metrics(session, engines[1]))["kvferry:transfer_bytes_total"] > 0
            await assert_quiescent(session, *engines)

    asyncio.run(check())
