"""Push when something is late, leaves or dies: right tokens or a clear error, and every block comes back."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
from tests.e2e.conftest import PATIENT, SHORT, random_prompts
from tests.e2e.handovers import FINISHED, assert_ended_well, count, fresh, is_free, is_loading
from tests.e2e.harness import Answer, Cluster, Engine, Prompt, ask, ask_all, assert_quiescent, metrics, new_session, prefill, until

from kvferry.protocol.push_tickets import PushTicket, PushTicketKey

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

REGISTERED = "kvferry:num_registrations"
LATE = {**SHORT, "kv_lease_duration": 6, "push_registration_timeout": 8}
"""Leases that outlive a leg that is two seconds late."""


@dataclass
class Legs:
    """P and two D, one of either policy. Tests take both legs by hand, as a router does, but when they like."""

    cluster: Cluster
    p: Engine
    decoders: dict[str, Engine]
    coordinates: dict[str, Any]

    def ticket(self) -> str:
        told = self.coordinates
        address = (told["remote_host"], told["remote_port"])
        ticket = PushTicket(uuid4().hex, told["remote_engine_id"], told["remote_epoch"], *address, told["tp_size"])
        return PushTicketKey(self.cluster.secret).sign(ticket)

    async def prefill_leg(self, session: aiohttp.ClientSession, prompt: Prompt, ticket: str) -> Answer:
        return await ask(session, self.p, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True, "push_ticket": ticket})

    async def decode_leg(self, session: aiohttp.ClientSession, d: Engine, prompt: Prompt, ticket: str) -> Answer:
        return await ask(session, d, prompt, kv_transfer_params={"do_remote_prefill": True, "push_ticket": ticket})


async def coordinates(p: Engine) -> dict[str, Any]:
    """What a router learns from P's first answer. Its blocks are left to their lease."""
    async with new_session() as session:
        return await prefill(session, p, Prompt((7, 8, 9)))


def start(cluster: Cluster, extra: dict[str, Any], *flags: str) -> Legs:
    started = cluster.serve("prefill", *flags, extra=extra, connector="NixlPushConnector", engine_id="p")
    decoders = {
        policy: cluster.serve(f"decode {policy}", *flags, extra=extra, policy=policy, connector="NixlPushConnector")
        for policy in ("fail", "recompute")
    }
    p = started.ready()
    return Legs(cluster, p, {policy: d.ready() for policy, d in decoders.items()}, asyncio.run(coordinates(p)))


@pytest.fixture(scope="module", params=["shm", "nixl"])
def legs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Legs]:
    with Cluster(tmp_path_factory.mktemp("push"), model) as cluster:
        yield start(cluster, {**LATE, "planes": [request.param]})


@pytest.mark.parametrize("is_p_first", [True, False])
def test_a_leg_that_is_two_seconds_late_gets_the_right_tokens(legs: Legs, plain: Engine, is_p_first: bool) -> None:
    d, prompt, ticket = legs.decoders["fail"], fresh(300), legs.ticket()

    async def check() -> None:
        async with new_session() as session:
            before = await count(session, d, FINISHED)
            early, late = legs.prefill_leg(session, prompt, ticket), legs.decode_leg(session, d, prompt, ticket)
            first = asyncio.create_task(early if is_p_first else late)
            await asyncio.sleep(2)
            second = asyncio.create_task(late if is_p_first else early)
            answers = await asyncio.gather(first, second)
            decoded = answers[1] if is_p_first else answers[0]
            assert decoded == await ask(session, plain, prompt)
            assert await count(session, d, FINISHED) == before + 1
            await assert_quiescent(session, legs.p, d)

    asyncio.run(check())


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_p_that_never_comes_ends_d_by_its_deadline(legs: Legs, plain: Engine, policy: str) -> None:
    d, prompt = legs.decoders[policy], fresh()

    async def check() -> None:
        async with new_session() as session:
            answer = await legs.decode_leg(session, d, prompt, legs.ticket())
            assert_ended_well(answer, await ask(session, plain, prompt), policy, "nothing to hand over within 8 s")
            await assert_quiescent(session, legs.p, d)

    asyncio.run(check())


def test_a_d_that_comes_after_the_lease_has_run_out_is_told(legs: Legs) -> None:
    d, prompt, ticket = legs.decoders["fail"], fresh(), legs.ticket()

    async def check() -> None:
        async with new_session() as session:
            await legs.prefill_leg(session, prompt, ticket)
            await until("P's lease has run out", lambda: is_free(session, legs.p))
            answer = await legs.decode_leg(session, d, prompt, ticket)
            assert (answer.status, "lease ran out before" in answer.message) == (502, True)

    asyncio.run(check())


def test_clients_that_leave_before_during_and_after_leave_nothing_behind(cluster: Cluster, plain: Engine) -> None:
    """With leases of ten minutes: what is free was released. Between them others go on, in the blocks that were given back."""
    legs = start(cluster, {**PATIENT, "planes": ["shm"]}, "--num-gpu-blocks-override", "80", "--max-num-batched-tokens", "64")
    rng = random.Random(11)
    prompts = random_prompts(40, seed=61, longest=300)

    async def leave(session: aiohttp.ClientSession) -> None:
        prompt, ticket = fresh(300), legs.ticket()
        tasks = [
            asyncio.create_task(legs.prefill_leg(session, prompt, ticket)),
            asyncio.create_task(legs.decode_leg(session, legs.decoders["fail"], prompt, ticket)),
        ]
        await asyncio.sleep(rng.random() * 0.5)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stay(session: aiohttp.ClientSession, prompt: Prompt) -> Answer:
        ticket = legs.ticket()
        _, answer = await asyncio.gather(
            legs.prefill_leg(session, prompt, ticket), legs.decode_leg(session, legs.decoders["fail"], prompt, ticket)
        )
        return answer

    async def check() -> None:
        right = await ask_all(plain, prompts)
        async with new_session() as session:
            for first in range(0, len(prompts), 4):
                leaving = asyncio.gather(*(leave(session) for _ in range(3)))
                assert await asyncio.gather(*(stay(session, prompt) for prompt in prompts[first : first + 4])) == right[first : first + 4]
                await leaving
            assert await count(session, legs.p, "kvferry:kv_expired_reqs_total") == 0
            # But for the blocks of the first answer, that the test itself has left to their lease.
            await until("P has given back all else", lambda: _has_used(session, legs.p, 1))
            await until("D has given back all", lambda: is_free(session, legs.decoders["fail"]))

    asyncio.run(check())


async def _has_used(session: aiohttp.ClientSession, engine: Engine, blocks: int) -> bool:
    return (await metrics(session, engine))["kvferry:num_used_blocks"] == blocks


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_p_that_is_killed_while_d_waits_ends_d_and_its_next_life_serves(cluster: Cluster, plain: Engine, policy: str) -> None:
    legs, prompt = start(cluster, {**LATE, "planes": ["nixl"]}), fresh()
    d = legs.decoders[policy]

    async def check() -> None:
        async with new_session() as session:
            waiting = asyncio.create_task(legs.decode_leg(session, d, prompt, legs.ticket()))
            await until("D waits, registered", lambda: _is_registered(session, legs.p))
            assert await is_loading(session, [d])
            legs.p.kill()
            assert_ended_well(await waiting, await ask(session, plain, prompt), policy, "lost", "heartbeats", "handshake")
            await assert_quiescent(session, d)
        cluster.dismiss(legs.p.process)
        legs.p = cluster.serve("prefill", extra=LATE | {"planes": ["nixl"]}, connector="NixlPushConnector", engine_id="p").ready()
        legs.coordinates = await coordinates(legs.p)
        async with new_session() as session:
            ticket, again = legs.ticket(), fresh()
            _, answer = await asyncio.gather(legs.prefill_leg(session, again, ticket), legs.decode_leg(session, d, again, ticket))
            assert answer == await ask(session, plain, again)

    asyncio.run(check())


async def _is_registered(session: aiohttp.ClientSession, p: Engine) -> bool:
    return await count(session, p, REGISTERED) > 0


def test_a_d_that_is_killed_after_it_registered_costs_p_one_lease(cluster: Cluster) -> None:
    legs, prompt = start(cluster, {**LATE, "planes": ["shm"]}), fresh()
    ticket, d = legs.ticket(), legs.decoders["fail"]

    async def check() -> None:
        async with new_session() as session:
            waiting = asyncio.create_task(legs.decode_leg(session, d, prompt, ticket))
            await until("D waits, registered", lambda: _is_registered(session, legs.p))
            d.kill()
            await asyncio.gather(waiting, return_exceptions=True)
            assert (await legs.prefill_leg(session, prompt, ticket)).is_ok
            await until("P is free", lambda: is_free(session, legs.p))
            assert not await _is_registered(session, legs.p)

    asyncio.run(check())


def test_prefills_that_are_cut_into_chunks_and_preempted_give_the_right_tokens(cluster: Cluster, plain: Engine) -> None:
    """P generates for others too, who came first and take the blocks they need from prefills that D is reading."""
    small = ("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "64")
    p = cluster.serve("prefill", *small, extra={**PATIENT, "planes": ["shm"]}, connector="NixlPushConnector")
    d = cluster.serve("decode", extra={**PATIENT, "planes": ["shm"]}, connector="NixlPushConnector")
    engines = [p.ready(), d.ready()]
    router = cluster.proxy(engines[:1], engines[1:]).ready()
    older = [fresh(60, max_tokens=240) for _ in range(2)]
    prompts = [fresh(length) for length in random.Random(5).choices(range(200, 400), k=30)]

    async def check() -> None:
        await ask_all(router, [Prompt((1, 2, 3))])
        async with new_session() as session:
            generating = [asyncio.create_task(ask(session, engines[0], prompt)) for prompt in older]
            answers = await ask_all(router, prompts, concurrency=4)
            answers += await asyncio.gather(*generating)
            assert answers == await ask_all(plain, [*prompts, *older])
            assert (await metrics(session, engines[0]))["vllm:num_preemptions_total"] > 0
            assert (await metrics(session, engines[1]))["kvferry:transfers_total/shm"] > 2 * len(prompts), "most came in several reads"
            await assert_quiescent(session, *engines)

    asyncio.run(check())
