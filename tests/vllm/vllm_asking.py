"""Requests and checks that only vLLM servers need, in addition to those for any engine."""

import json
import random
from typing import Any

import aiohttp
from tests.e2e.harness import Engine, Prompt, ask, metrics, until

ONLY_THE_BEST = {"temperature": 1.0, "top_k": 1}
"""Greedy tokens for several choices, for which vLLM refuses temperature 0."""


def random_prompts(
    count: int, seed: int, shortest: int = 20, longest: int = 1500, max_tokens: int = 16
) -> list[Prompt]:
    """Make different prompts with lengths over the whole range, many of them short, some at block
    boundaries.
    """
    rng = random.Random(seed)
    edges = [n for n in (31, 32, 33, 63, 64, 65, 96, 127, 128, 129) if shortest <= n <= longest]
    lengths = [
        rng.choice(edges)
        if edges and rng.random() < 0.2
        else int(shortest * (longest / shortest) ** rng.random())
        for _ in range(count)
    ]
    return [
        Prompt(tuple(rng.randrange(10, 500) for _ in range(length)), max_tokens)
        for length in lengths
    ]


async def assert_free(
    session: aiohttp.ClientSession, *engines: Engine, timeout_s: float = 60
) -> None:
    """Wait until no block of these engines is in use and no request runs or waits."""
    names = ("vllm:kv_cache_usage_perc", "vllm:num_requests_running", "vllm:num_requests_waiting")

    async def is_free() -> bool:
        for engine in engines:
            found = await metrics(session, engine)
            if any(found[name] for name in names):
                # An idle engine notices the end of a lease up to 15 s late, and in its next step.
                await ask(session, engine, Prompt((11,), 1))
                return False
        return True

    await until("all KV blocks are free", is_free, timeout_s)


async def stream(
    session: aiohttp.ClientSession, engine: Engine, prompt: Prompt, **changes: Any
) -> tuple[int, ...]:
    """Stream a completion and return all its token ids."""
    tokens: list[int] = []
    async with session.post(
        f"{engine.url}/v1/completions", json={**prompt.body(), "stream": True, **changes}
    ) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                tokens += [
                    token for choice in chunk["choices"] for token in choice.get("token_ids") or ()
                ]
    return tuple(tokens)
