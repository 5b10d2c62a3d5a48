"""Tests the rows of docs/faults.md with real engines. Other rows are tested elsewhere: network
faults in `test_network.py` and `test_control_channel.py`, malformed input in `test_abuse.py`,
tickets of other prompts in `test_bytes_moved.py`.

Every request ends with right tokens or a clear error, and every block becomes free.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from tests.e2e.conftest import PATIENT, SHORT, Fleet, Pair, random_prompts
from tests.e2e.forgeries import send_garbage
from tests.e2e.handovers import assert_ended_well, assert_recovers, count, fresh, hand_over, is_free
from tests.e2e.harness import (
    Answer,
    Cluster,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_quiescent,
    assert_said,
    metrics,
    new_session,
    post,
    prefill,
    until,
)
from tests.e2e.proxied_engine import BEHIND, Channels
from tests.ports import reserve_port

from kvferry.testing.fault_proxy import FaultProxy, ProxyDirection
from kvferry.types import Address

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
EXPIRED = "kvferry:kv_expired_reqs_total"


async def used_blocks(session: aiohttp.ClientSession, engine: Engine) -> float:
    return (await metrics(session, engine))["kvferry:num_used_blocks"]


# -- a client leaves: both sides are free within one heartbeat interval --
# Leases are 600 s and none has expired, so blocks that are free were released.


def test_a_client_that_leaves_while_p_computes_leaves_no_block_behind(patient: Pair) -> None:
    async def check() -> None:
        async with new_session() as session:
            expired = await count(session, patient.p, EXPIRED)
            patient.p.pause()
            try:
                await leave(
                    asyncio.create_task(ask(session, patient.router, fresh())),
                    after=lambda: _is_routing(session, patient.router),
                )
            finally:
                patient.p.resume()
            await assert_freed(session, patient, expired)

    asyncio.run(check())


def test_an_answer_of_p_that_crosses_with_the_router_s_leaving_leaves_no_block_behind(
    shared: Cluster, patient: Pair
) -> None:
    """The connection to P is slow: only long after its answer does P learn that the router has
    left.
    """
    p = patient.p

    async def check() -> None:
        async with new_session() as session:
            expired = await count(session, p, EXPIRED)
            with FaultProxy(p.address, Address("127.0.0.1", 0)) as wire:
                router = shared.proxy([Engine(p.process, wire.address)], [patient.d]).ready()
                before = wire.carried_bytes(ProxyDirection.TO_SERVER)

                async def is_asked() -> bool:
                    return wire.carried_bytes(ProxyDirection.TO_SERVER) > before + 1000

                p.pause()
                try:
                    asking = asyncio.create_task(ask(session, router, fresh(300)))
                    await until("P has been asked", is_asked)
                    wire.stall(ProxyDirection.TO_SERVER)
                    await leave(asking, after=is_asked)
                    await until("the router has left", lambda: _has_noticed(session, router))
                finally:
                    p.resume()
                await assert_freed(session, patient, expired)
            shared.dismiss(router.process)

    asyncio.run(check())


def test_a_client_that_leaves_before_d_answers_has_p_freed_by_the_router(patient: Pair) -> None:
    """D is stopped, so D cannot release P's blocks: the router hands the ticket back to P."""

    async def check() -> None:
        async with new_session() as session:
            expired = await count(session, patient.p, EXPIRED)
            patient.d.pause()
            try:
                await leave(
                    asyncio.create_task(ask(session, patient.router, fresh())),
                    after=lambda: _holds(session, patient.p),
                )
                await until("P is free while D stands still", lambda: is_free(session, patient.p))
            finally:
                patient.d.resume()
            await assert_freed(session, patient, expired)

    asyncio.run(check())


def test_a_client_that_leaves_while_d_generates_leaves_no_block_behind(patient: Pair) -> None:
    async def check() -> None:
        async with new_session() as session:
            expired = await count(session, patient.p, EXPIRED)
            asking = asyncio.create_task(ask(session, patient.router, fresh(max_tokens=2000)))
            await leave(asking, after=lambda: _is_running(session, patient.d))
            await assert_freed(session, patient, expired)

    asyncio.run(check())


def test_clients_that_leave_at_any_moment_leave_no_block_behind(patient: Pair) -> None:
    async def check() -> None:
        async with new_session() as session:
            expired = await count(session, patient.p, EXPIRED)
            rng = random.Random(7)
            for _ in range(25):
                task = asyncio.create_task(ask(session, patient.router, fresh(300, max_tokens=64)))
                await asyncio.sleep(rng.random() * 0.4)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await assert_freed(session, patient, expired)

    asyncio.run(check())


async def leave(asking: "asyncio.Task[Answer]", after: Callable[[], Awaitable[bool]]) -> None:
    """Disconnect the client once its request has reached this point."""
    await until("the request has come so far", after)
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def assert_freed(session: aiohttp.ClientSession, pair: Pair, expired: float) -> None:
    await assert_quiescent(session, pair.p, pair.d)
    assert await count(session, pair.p, EXPIRED) == expired
    assert (await ask(session, pair.router, fresh())).is_ok


async def _is_routing(session: aiohttp.ClientSession, router: Engine) -> bool:
    return await count(session, router, "kvferry:router_active_requests") > 0


async def _has_noticed(session: aiohttp.ClientSession, router: Engine) -> bool:
    return await count(session, router, "kvferry:router_client_aborts_total") > 0


async def _holds(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return await count(session, engine, "kvferry:num_held_blocks") > 0


async def _is_running(session: aiohttp.ClientSession, engine: Engine) -> bool:
    return (await metrics(session, engine))["vllm:num_requests_running"] > 0


# -- D is killed: P's blocks are free when the lease ends; other requests are not affected --


def test_blocks_come_back_when_the_decode_side_is_killed(fleet: Fleet) -> None:
    """D is busy, so requests queue there, and heartbeats keep their leases alive far beyond the
    first lease duration; then D is killed.
    """
    p = fleet.p
    d = fleet.cluster.serve("doomed decode", "--max-num-seqs", "1", extra=SHORT).ready()

    async def check() -> None:
        async with new_session() as session:
            endless = [
                asyncio.create_task(ask(session, d, Prompt((11, 12, n), max_tokens=4000)))
                for n in range(13, 17)
            ]
            await until("D is busy", lambda: _is_running(session, d))
            prompts = random_prompts(6, seed=11, longest=100)
            params = [await prefill(session, p, prompt) for prompt in prompts]
            held = await used_blocks(session, p)
            assert held > 0
            waiting = [
                asyncio.create_task(ask(session, d, prompt, kv_transfer_params=part))
                for prompt, part in zip(prompts, params, strict=True)
            ]
            lease_s = SHORT["kv_lease_duration"]
            for _ in range(5):
                await asyncio.sleep(lease_s / 2)
                assert await used_blocks(session, p) == held
            assert not endless[-1].done(), (
                "D was not busy for long enough for this test to show anything"
            )
            d.kill()
            await asyncio.gather(*endless, return_exceptions=True)
            for outcome in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(outcome, aiohttp.ClientError)
            await assert_quiescent(session, p)
            assert (await ask(session, p, prompts[0])).is_ok

    asyncio.run(check())


# -- P is killed or restarted: the failure policy applies within seconds; D keeps serving and uses
# the new P --


@pytest.mark.parametrize(
    "policy", ["fail", pytest.param("recompute", marks=pytest.mark.exhaustive)]
)
def test_the_decode_side_survives_the_death_and_return_of_the_prefill_side(
    cluster: Cluster, plain: Engine, policy: str
) -> None:
    """Requests continue while P is killed with SIGKILL and started again at the same address with
    the same engine id.
    """
    starting = [
        cluster.serve("prefill", extra=SHORT, policy=policy, engine_id="p", port=reserve_port()),
        cluster.serve("decode", extra=SHORT, policy=policy),
    ]
    first, d = (process.ready() for process in starting)
    router = cluster.proxy([first], [d]).ready()
    prompts = [
        Prompt(tuple(random.Random(n).randrange(10, 500) for _ in range(100))) for n in range(60)
    ]

    async def check() -> None:
        reference = {
            p.token_ids: a for p, a in zip(prompts, await ask_all(plain, prompts), strict=True)
        }
        outcomes: list[tuple[Prompt, Answer, float]] = []
        async with new_session() as session:

            async def client(share: list[Prompt]) -> None:
                for prompt in share:
                    since = time.monotonic()
                    answer = await ask(session, router, prompt)
                    outcomes.append((prompt, answer, time.monotonic() - since))

            clients = [asyncio.create_task(client(prompts[n:40:4])) for n in range(4)]
            await until("some traffic", lambda: _at_least(outcomes, 8))
            first.kill()
            second = cluster.serve(
                "prefill again", extra=SHORT, policy=policy, engine_id="p", port=first.address.port
            ).ready()
            await asyncio.gather(*clients)
            for prompt, answer, took_s in outcomes:
                assert took_s < DEADLINE_S
                assert (
                    answer == reference[prompt.token_ids]
                    if answer.is_ok
                    else answer.status in (502, 503)
                )
            assert any(answer.is_ok for _, answer, _ in outcomes)

            async def is_back() -> bool:
                return (await ask(session, router, prompts[0])).is_ok

            await until("the new P is used", is_back)
            before = (await metrics(session, d))["kvferry:finished_loads_total"]
            for prompt in prompts[40:]:
                assert await ask(session, router, prompt) == reference[prompt.token_ids]
            assert (await metrics(session, d))["kvferry:finished_loads_total"] >= before + 20
            await assert_quiescent(session, second, d)

    asyncio.run(check())


async def _at_least(items: list[tuple[Prompt, Answer, float]], count: int) -> bool:
    return len(items) >= count


# -- the lease has expired: refused, failure policy, never wrong tokens --


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_lease_that_ran_out_before_the_read_is_refused_never_read_wrong(
    fleet: Fleet, policy: str
) -> None:
    """D is stopped until P has reused the blocks for other prompts."""
    p, d = fleet.p, fleet.strict if policy == "fail" else fleet.lenient

    async def check() -> None:
        async with new_session() as session:
            prompts = [
                Prompt(tuple(random.Random(f"{policy} {n}").randrange(10, 500) for _ in range(250)))
                for n in range(4)
            ]
            before = (await metrics(session, d)).get("kvferry:failed_loads_total", 0)
            # D already knows P, so it could read at once when it continues.
            warm = Prompt(tuple(range(20, 60)))
            assert (
                await ask(session, d, warm, kv_transfer_params=await prefill(session, p, warm))
            ).is_ok
            params = await prefill(session, p, prompts[0])
            d.pause()
            late = asyncio.create_task(ask(session, d, prompts[0], kv_transfer_params=params))
            await until("the lease has run out", lambda: is_free(session, p))
            for prompt in prompts[1:]:
                assert (await ask(session, p, prompt)).is_ok
            d.resume()
            answer = await late
            if policy == "fail":
                assert answer.status == 502
                assert "lease" in answer.message or "lost" in answer.message
            else:
                assert answer == await ask(session, p, prompts[0])
            # D's prefix cache holds no wrong block either.
            assert await ask(session, d, prompts[0]) == await ask(session, p, prompts[0])
            assert (await metrics(session, d))["kvferry:failed_loads_total"] == before + 1
            await assert_quiescent(session, p, d)

    asyncio.run(check())


def test_a_ticket_that_nobody_uses_frees_its_blocks_when_the_lease_ends(fleet: Fleet) -> None:
    p = fleet.p

    async def check() -> None:
        async with new_session() as session:
            await assert_quiescent(session, p)
            before = (await metrics(session, p)).get("vllm:nixl_num_kv_expired_reqs_total", 0)
            await prefill(session, p, Prompt(tuple(range(10, 200))))
            assert await used_blocks(session, p) == 12
            await assert_quiescent(session, p)
            assert (await metrics(session, p))["vllm:nixl_num_kv_expired_reqs_total"] == before + 1

    asyncio.run(check())


def test_an_engine_given_its_own_ticket_computes_from_its_own_cache(patient: Pair) -> None:
    p = patient.p

    async def check() -> None:
        async with new_session() as session:
            prompt = Prompt(tuple(range(10, 200)))
            params = await prefill(session, p, prompt)
            assert await post(
                session, p, {**prompt.body(), "kv_transfer_params": params}
            ) == await ask(session, p, prompt)
            await assert_quiescent(session, p)

    asyncio.run(check())


# -- the router is killed between the legs: P frees its blocks when the lease ends --


def test_a_router_killed_between_the_legs_leaves_p_to_its_lease(fleet: Fleet) -> None:
    """D is behind a proxy that forwards nothing, so the decode leg never reaches it."""
    p, d = fleet.p, fleet.strict

    async def check() -> None:
        async with new_session() as session:
            await assert_quiescent(session, p, d)
            expired = await count(session, p, EXPIRED)
            with FaultProxy(d.address, Address("127.0.0.1", 0)) as wire:
                wire.stall()
                router = fleet.cluster.proxy([p], [Engine(d.process, wire.address)]).ready()
                asking = asyncio.create_task(ask(session, router, fresh()))
                await until("P's leg is done", lambda: _holds(session, p))
                router.kill()
                fleet.cluster.dismiss(router.process)
                assert isinstance(
                    *await asyncio.gather(asking, return_exceptions=True), aiohttp.ClientError
                )
            await assert_quiescent(session, p, d)
            assert await count(session, p, EXPIRED) == expired + 1

    asyncio.run(check())


# -- malformed messages are counted, and nothing else changes --


def test_malformed_frames_and_wrong_ranks_are_counted_on_both_channels(
    cluster: Cluster, plain: Engine
) -> None:
    """The sender is a cluster member with a bug: it has the keys, so all messages arrive."""
    starting = [
        cluster.serve("prefill", extra=PATIENT, at=BEHIND),
        cluster.serve("decode", extra=PATIENT),
    ]
    p, d = (process.ready() for process in starting)

    async def check() -> None:
        async with new_session() as session:
            with Channels.opened(p) as channels:
                for proxy in channels.proxies:
                    before = await count(session, p, "kvferry:dropped_messages_total")
                    sent = send_garbage(cluster.secret, f"tcp://{proxy.address}")

                    async def is_counted(expected: float = before + sent) -> bool:
                        # An engine updates its metrics with a step.
                        assert (await ask(session, p, Prompt((11, 12)))).is_ok
                        return await count(session, p, "kvferry:dropped_messages_total") == expected

                    await until("all are counted", is_counted)
                await assert_recovers(session, p, d, plain)

    asyncio.run(check())


# -- every wait has a deadline that is configured, logged and tested (reads: test_network.py) --


def test_every_wait_of_d_ends_by_its_own_deadline_which_the_error_and_the_log_name(
    cluster: Cluster, plain: Engine
) -> None:
    """P's leases are so long that no heartbeat is due: nothing else can end these waits."""
    starting = [
        cluster.serve("prefill", extra=PATIENT, at=BEHIND),
        cluster.serve("hasty", extra={"handshake_timeout": 1, "confirm_timeout": 1.5}),
        cluster.serve("patient", extra={"handshake_timeout": 60, "receive_timeout": 2}),
    ]
    p, hasty, patient = (process.ready() for process in starting)

    async def assert_overdue(session: aiohttp.ClientSession, d: Engine, reason: str) -> None:
        assert_ended_well(await hand_over(session, p, d, fresh()), Answer(200), "fail", reason)
        await assert_said(d, reason)

    async def check() -> None:
        async with new_session() as session:
            with Channels.opened(p) as channels:
                channels.all(FaultProxy.stall)
                await assert_overdue(session, hasty, "did not answer the handshake within 1 s")
                await assert_overdue(session, patient, "did not arrive within 2 s")
                channels.flow()
                for d in (hasty, patient):
                    await assert_recovers(session, p, d, plain)
                channels.all(lambda proxy: proxy.stall(ProxyDirection.TO_CLIENT))
                await assert_overdue(session, hasty, "did not confirm the read within 1.5 s")
                channels.flow()
                # The leases are 600 s: D released the requests that it gave up as soon as it could
                # reach P again.
                await assert_quiescent(session, hasty, patient)

    asyncio.run(check())
