"""Embedded engines with storage tiers, and what tests of faults check: the counters, the lines in
the log, and that the tiers are used again when the fault has ended.
"""

from typing import Any

from tests.e2e.harness import (
    HERE,
    Answer,
    Cluster,
    Engine,
    Host,
    Prompt,
    Starting,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    until,
)

BLOCK_TOKENS = 16
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
HIT_TOKENS = "kvferry:offload_hit_tokens_total"
TROUBLE = "KV cannot be "


def serve(cluster: Cluster, name: str, tiers: list[dict[str, Any]], **more: Any) -> Engine:
    return start(cluster, name, tiers, **more).ready()


def start(
    cluster: Cluster, name: str, tiers: list[dict[str, Any]], at: Host = HERE, **more: Any
) -> Starting:
    """Start an engine without a prefix cache: a prompt that is asked again comes from a tier."""
    extra = {"tiers": tiers, "break_even": False, "load_timeout": 2.0, **more}
    return cluster.serve(
        name,
        "--no-enable-prefix-caching",
        connector="OffloadingConnector",
        extra=extra,
        environment=CREDENTIALS,
        at=at,
    )


def prompt_of(num_chunks: int, number: int = 0) -> Prompt:
    """A prompt of so many chunks. Prompts with different numbers have no chunk in common."""
    tokens = ((17 * n + number) % 400 + 10 for n in range(num_chunks * BLOCK_TOKENS))
    return Prompt(tuple(tokens))


async def counters(engine: Engine) -> dict[str, float]:
    async with new_session() as session:
        return await metrics(session, engine)


async def until_counted(engine: Engine, name: str, count: float) -> None:
    async def is_counted() -> bool:
        return (await counters(engine)).get(name, 0) >= count

    await until(f"{name} is {count}", is_counted)


async def until_stored(engine: Engine, tier: str, count: int) -> None:
    await until_counted(engine, f"kvferry:tier_stores_total/{tier}", count)


async def until_hit(engine: Engine, prompt: Prompt, right: Answer) -> None:
    """Ask the prompt until its KV comes from a tier. A tier that has failed pauses for 5 s."""
    before = (await counters(engine)).get(HIT_TOKENS, 0)

    async def is_hit() -> bool:
        assert await ask_all(engine, [prompt]) == [right]
        found = await counters(engine)
        return found.get(HIT_TOKENS, 0) - before >= len(prompt.token_ids)

    await until("the prompt's KV comes from a tier again", is_hit)


async def assert_free_of_requests(engine: Engine) -> None:
    async with new_session() as session:
        await assert_quiescent(session, engine)


async def troubles(engine: Engine, num_lines: int = 1) -> list[str]:
    """The lines in the engine's log about tiers that fail, as soon as there are so many."""

    def lines() -> list[str]:
        return [line for line in engine.process.tail(200) if TROUBLE in line]

    async def are_there() -> bool:
        return len(lines()) >= num_lines

    await until("the log names the trouble", are_there)
    return lines()
