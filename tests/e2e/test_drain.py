"""Tests SIGTERM with real engines: running requests continue to their end or to the drain timeout,
new requests are refused, and the process exits with 0.
"""

import asyncio
import json
import random
import signal
import time
from typing import Any

import aiohttp
import psutil
import pytest
from tests.e2e.conftest import PATIENT, SHORT
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    ask,
    assert_quiescent,
    assert_said,
    metrics,
    new_session,
    prefill,
    until,
)

pytestmark = pytest.mark.slow

EXIT_S = 60.0
LONG = 4000
"""Tokens to generate: nearly as many as the model allows."""
FAR_S = "600"
"""A drain timeout that no test reaches."""


@pytest.fixture(scope="module")
def narrow(shared: Cluster) -> Engine:
    """A D that serves one request at a time, so that others queue."""
    return shared.serve(
        "narrow decode", "--max-num-seqs", "1", extra=SHORT | {"receive_timeout": 60}
    ).ready()


def prompt_of(seed: str, max_tokens: int = 16) -> Prompt:
    rng = random.Random(f"drain {seed}")
    return Prompt(tuple(rng.randrange(10, 500) for _ in range(120)), max_tokens=max_tokens)


def tell(engine: Engine, number: signal.Signals = signal.SIGTERM) -> list[psutil.Process]:
    """Send a signal to every process of an engine, as service managers do; returns the
    processes.
    """
    family = engine.family()
    for member in family:
        member.send_signal(number)
    return family


def has_ended(process: psutil.Process) -> bool:
    """True also for a zombie, which has ended but has not been reaped yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def ended(engine: Engine, family: list[psutil.Process]) -> None:
    """Check that the engine ends by itself with exit code 0 and leaves no process behind."""
    await asyncio.to_thread(engine.process.wait, EXIT_S)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=EXIT_S)
    assert all(has_ended(process) for process in alive), f"left behind: {alive}"


async def health(session: aiohttp.ClientSession, engine: Engine) -> dict[str, Any]:
    async with session.get(f"{engine.url}/health") as response:
        body = await response.read()
        assert response.status == (503 if body else 200), body
        return dict(json.loads(body)) if body else {}


async def is_draining(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return (await health(session, engine)).get("status") == "draining"


async def assert_refused(session: aiohttp.ClientSession, engine: Engine) -> None:
    async with session.post(
        f"{engine.url}/v1/completions", json=prompt_of("newcomer").body()
    ) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert "the server is stopping" in (await response.json())["error"]["message"]


async def occupied(session: aiohttp.ClientSession, engine: Engine) -> "list[asyncio.Task[Answer]]":
    """Start requests that keep a narrow engine busy until they are cancelled, so that all later
    ones queue.
    """
    tasks = [
        asyncio.create_task(ask(session, engine, Prompt((11, 12, number), max_tokens=LONG)))
        for number in range(13, 21)
    ]
    await until("they are queued", lambda: _is_busy(session, engine, len(tasks)))
    return tasks


async def release(tasks: "list[asyncio.Task[Answer]]") -> None:
    assert not tasks[-1].done(), (
        "the queue was not held up for long enough for this test to show anything"
    )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_a_draining_prefill_side_serves_its_leases_to_their_end(
    shared: Cluster, narrow: Engine, plain: Engine
) -> None:
    """One request with a ticket is queued at D when P gets SIGTERM, another one comes later;
    heartbeats keep both leases alive.
    """
    p = shared.serve(
        "drained prefill", "--drain-timeout", FAR_S, "--tensor-parallel-size", "2", extra=SHORT
    ).ready()
    prompts = [prompt_of("early"), prompt_of("late")]

    async def check() -> None:
        async with new_session() as session:
            right = [await ask(session, plain, prompt) for prompt in prompts]
            before = (await metrics(session, narrow)).get("kvferry:finished_loads_total", 0)
            occupants = await occupied(session, narrow)
            params = [await prefill(session, p, prompt) for prompt in prompts]
            early = asyncio.create_task(
                ask(session, narrow, prompts[0], kv_transfer_params=params[0])
            )
            family = tell(p)
            await until("P drains", lambda: is_draining(session, p))
            late = asyncio.create_task(
                ask(session, narrow, prompts[1], kv_transfer_params=params[1])
            )
            await assert_refused(session, p)
            until_s = time.monotonic() + 2 * SHORT["kv_lease_duration"]
            while time.monotonic() < until_s:
                assert await health(session, p) == {
                    "status": "draining",
                    "requests": 0,
                    "leases": 2,
                    "blocks": 16,
                }
                assert (await metrics(session, p))["kvferry:num_delayed_frees"] == 2
                await asyncio.sleep(0.2)
            await release(occupants)
            assert [await early, await late] == right
            assert right[0] != right[1], "different prompts must differ, or equality proves nothing"
            assert (await metrics(session, narrow))["kvferry:finished_loads_total"] == before + 2
            await ended(p, family)
            await assert_quiescent(session, narrow)

    asyncio.run(check())


def test_a_lease_that_nobody_ends_is_given_up_at_the_bound(shared: Cluster, narrow: Engine) -> None:
    """The lease lasts 600 s, but P exits at its drain timeout of 1 s. D, whose request is queued,
    learns that P is gone.
    """
    p = shared.serve("bounded prefill", "--drain-timeout", "1", extra=PATIENT).ready()

    async def check() -> None:
        async with new_session() as session:
            occupants = await occupied(session, narrow)
            fetched, unfetched = prompt_of("fetched too late"), prompt_of("never fetched")
            params = await prefill(session, p, fetched)
            await prefill(session, p, unfetched)
            waiting = asyncio.create_task(ask(session, narrow, fetched, kv_transfer_params=params))
            await until("D has met P", lambda: _has_peer(session, narrow))
            await ended(p, tell(p))
            await assert_said(p, "stopping although peers have not read all blocks leases=2")
            await release(occupants)
            answer = await waiting
            assert answer.status == 502
            assert (
                "the KV cache of this request could not be fetched: the connection to tcp://"
                in answer.message
            )
            await assert_quiescent(session, narrow)

    asyncio.run(check())


async def _has_peer(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return (await metrics(session, engine)).get("kvferry:num_peers", 0) > 0


def test_a_draining_decode_side_finishes_what_runs_and_what_waits(
    cluster: Cluster, plain: Engine
) -> None:
    starting = [
        cluster.serve("prefill", extra=PATIENT),
        cluster.serve("decode", "--drain-timeout", FAR_S, "--max-num-seqs", "1", extra=PATIENT),
    ]
    p, d = (process.ready() for process in starting)
    router = cluster.proxy([p], [d]).ready()
    prompts = [prompt_of("runs", max_tokens=300), prompt_of("waits")]

    async def check() -> None:
        async with new_session() as session:
            right = [await ask(session, plain, prompt) for prompt in prompts]
            asked = [asyncio.create_task(ask(session, router, prompts[0]))]
            await until("it runs", lambda: _is_busy(session, d, 1))
            asked.append(asyncio.create_task(ask(session, router, prompts[1])))
            await until("the other one waits", lambda: _is_busy(session, d, 2))
            family = tell(d)
            await until("D drains", lambda: is_draining(session, d))
            assert (await health(session, d))["requests"] == 2, (
                "nothing was left to finish when D was told to end"
            )
            # P has computed this prompt by then and gets its blocks back long before the lease of
            # 600 s ends.
            answer = await ask(session, router, prompt_of("newcomer"))
            assert (answer.status, "the server is stopping" in answer.message) == (503, True)
            assert await asyncio.gather(*asked) == right
            await ended(d, family)
            await assert_quiescent(session, p)

    asyncio.run(check())


async def _is_busy(session: aiohttp.ClientSession, engine: Engine, count: int) -> bool:
    found = await metrics(session, engine)
    return found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"] >= count


def test_streams_that_are_left_at_the_bound_end_with_the_reason(cluster: Cluster) -> None:
    d = cluster.serve("decode", "--drain-timeout", "0.5", is_plain=True).ready()

    async def check() -> None:
        async with new_session() as session:
            body = prompt_of("endless", max_tokens=3900).body() | {"stream": True}
            async with session.post(f"{d.url}/v1/completions", json=body) as response:
                await response.content.readuntil(b"\n\n")
                family = tell(d)
                *_, last, done, _ = (await response.read()).decode().split("\n\n")
            assert (json.loads(last.removeprefix("data: "))["error"]["code"], done) == (
                503,
                "data: [DONE]",
            )
            await ended(d, family)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("bound", "signals"),
    [
        (FAR_S, [signal.SIGTERM, signal.SIGTERM]),
        (FAR_S, [signal.SIGINT]),
        ("0", [signal.SIGTERM]),
    ],
    ids=["second signal", "Ctrl-C", "no time to drain"],
)
def test_whoever_is_in_a_hurry_does_not_wait_for_leases(
    cluster: Cluster, bound: str, signals: list[signal.Signals]
) -> None:
    p = cluster.serve("prefill", "--drain-timeout", bound, extra=PATIENT).ready()

    async def check() -> None:
        async with new_session() as session:
            await prefill(session, p, prompt_of("never fetched"))
            family = p.family()
            for number in signals:
                tell(p, number)
                if number is not signals[-1]:
                    await until("P drains", lambda: is_draining(session, p))
            await ended(p, family)

    asyncio.run(check())
