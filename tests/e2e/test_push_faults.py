"""Tests push when a leg is late, a client leaves, or an engine stops or dies: each request ends
with right tokens or a clear error, every block becomes free, and no other request gets wrong
tokens.

Right after each fault in the middle of a transfer, canaries take every block of both D, and hold
the blocks while P continues, if P is still alive. Two D, one per failure policy, share one prefill.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.canaries import SMALL, Canaries, disturb
from tests.e2e.conftest import PATIENT, random_prompts
from tests.e2e.half_pushed import EXTRA, LONG, Stage
from tests.e2e.handovers import FINISHED, count, fresh, is_free
from tests.e2e.harness import (
    Cluster,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    until,
)
from tests.e2e.push_legs import EXPIRED, Legs, Shape, assert_all_ended_well, count_now

pytestmark = pytest.mark.slow

SILENCE = "no longer answers heartbeats", "was lost"

Story = Callable[[aiohttp.ClientSession], Awaitable[None]]


@pytest.fixture(scope="module")
def canaries(plain: Engine) -> Canaries:
    return Canaries.hatch(plain)


# Over nixl D reads, over tcp P writes. Over shm D reads as over nixl.
@pytest.fixture(
    scope="module",
    params=[pytest.param("shm", marks=pytest.mark.exhaustive), "nixl", "tcp"],
)
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Stage]:
    open_stage = Stage.between_hosts if request.param == "tcp" else Stage.opened
    with open_stage(request.param, tmp_path_factory.mktemp("stage"), model) as made:
        yield made


# What happens before the first byte moves, what a client does and what a death costs is alike over
# every transport.
any_transport = pytest.mark.parametrize(
    "stage", [pytest.param("nixl", marks=pytest.mark.exhaustive), "tcp"], indirect=True
)


def play(story: Story, stage: Stage, plain: Engine) -> None:
    """Run a story; then check that every block is free, that P and both D work together without a
    restart, and that every block is free again.
    """

    async def whole() -> None:
        async with new_session() as session:
            await story(session)
            await stage.settle(session)
            for d in stage.legs.decoders.values():
                await stage.legs.assert_recovers(session, d, plain)
            await stage.settle(session)

    try:
        asyncio.run(whole())
    except BaseException:
        for engine in stage.legs.engines:
            print(
                "\n".join([f"last log lines of {engine.process.name}:", *engine.process.tail(30)])
            )
        raise


@any_transport
@pytest.mark.parametrize("is_p_first", [True, False])
def test_a_leg_that_is_two_seconds_late_gets_the_right_tokens(
    stage: Stage, plain: Engine, is_p_first: bool
) -> None:
    async def hand_over(session: aiohttp.ClientSession, d: Engine) -> None:
        legs, prompt, ticket = stage.legs, fresh(300), stage.legs.ticket()
        before = await count(session, d, FINISHED)
        orders = [
            legs.prefill_leg(session, prompt, ticket),
            legs.decode_leg(session, d, prompt, ticket),
        ]
        first, second = orders if is_p_first else reversed(orders)
        early = asyncio.create_task(first)
        await asyncio.sleep(2)
        late = await second
        of_p, of_d = (await early, late) if is_p_first else (late, await early)
        assert of_p.is_ok
        assert of_d == await ask(session, plain, prompt)
        assert await count(session, d, FINISHED) == before + 1, "it was fetched, not computed"

    async def story(session: aiohttp.ClientSession) -> None:
        for d in stage.legs.decoders.values():
            await hand_over(session, d)

    play(story, stage, plain)


@any_transport
def test_a_p_that_never_comes_ends_d_by_its_deadline(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        prompt = fresh(LONG)
        decoding = stage.legs.decode_legs(session, prompt, stage.legs.ticket())
        timeout_s = EXTRA["push_registration_timeout"]
        await assert_all_ended_well(
            decoding,
            await ask(session, plain, prompt),
            f"offered no blocks within {timeout_s} s",
        )
        await canaries.check(session, *stage.legs.decoders.values())

    play(story, stage, plain)


@any_transport
def test_a_d_that_comes_after_the_lease_has_run_out_is_told(stage: Stage, plain: Engine) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        legs, prompt, ticket = stage.legs, fresh(), stage.legs.ticket()
        await stage.settle(session)
        expired = await count_now(session, legs.p, EXPIRED)
        assert (await legs.prefill_leg(session, prompt, ticket)).is_ok
        await until("P's lease has run out", lambda: is_free(session, legs.p))
        assert await count_now(session, legs.p, EXPIRED) == expired + 1
        await assert_all_ended_well(
            legs.decode_legs(session, prompt, ticket),
            await ask(session, plain, prompt),
            "lease expired before",
        )

    play(story, stage, plain)


@any_transport
def test_a_p_that_is_killed_while_d_waits_ends_d_and_its_next_life_serves(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        prompt = fresh(LONG)
        decoding = stage.legs.decode_legs(session, prompt, stage.legs.ticket())
        await stage.legs.until_registered(session, len(decoding))
        stage.kill_p()
        await assert_all_ended_well(
            decoding, await ask(session, plain, prompt), "handshake", *SILENCE
        )
        await canaries.check(session, *stage.legs.decoders.values())
        await stage.legs.replace_p()

    play(story, stage, plain)


@any_transport
def test_a_d_that_is_killed_after_it_registered_costs_p_one_lease(
    stage: Stage, plain: Engine
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        legs, prompt, ticket = stage.legs, fresh(), stage.legs.ticket()
        waiting = asyncio.create_task(
            legs.decode_leg(session, legs.decoders["fail"], prompt, ticket)
        )
        await legs.until_registered(session, 1)
        legs.decoders["fail"].kill()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await legs.prefill_leg(session, prompt, ticket)).is_ok
        await until("P is free", lambda: is_free(session, legs.p))
        await legs.until_registered(session, 0)
        legs.replace_d("fail")

    play(story, stage, plain)


@any_transport
def test_clients_that_leave_before_the_transfer_leave_nothing_behind(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await stage.settle(session)
        expired = await count_now(session, stage.legs.p, EXPIRED)
        prompt, ticket = fresh(LONG), stage.legs.ticket()
        decoding = stage.legs.decode_legs(session, prompt, ticket)
        await stage.legs.until_registered(session, len(decoding))
        for task in decoding.values():
            task.cancel()
        async with canaries.fill(session, *stage.legs.decoders.values()):
            assert (await stage.legs.prefill_leg(session, prompt, ticket)).is_ok
        await stage.settle(session)
        assert await count_now(session, stage.legs.p, EXPIRED) == expired, (
            "P was told, and did not wait for its lease"
        )

    play(story, stage, plain)


@any_transport
def test_clients_that_leave_during_the_transfer_leave_nothing_behind(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    """P is stopped: D gets its blocks back without P's help."""

    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.partial_push(session) as begun:
            for task in begun.decoding.values():
                task.cancel()
            async with canaries.fill(session, *stage.legs.decoders.values()):
                stage.continue_p()
                assert (await begun.prefilling).is_ok

    play(story, stage, plain)


@any_transport
def test_clients_that_leave_after_the_transfer_leave_nothing_behind(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await stage.settle(session)
        expired = await count_now(session, stage.legs.p, EXPIRED)
        before = {
            policy: await count(session, d, FINISHED) for policy, d in stage.legs.decoders.items()
        }
        prompt, ticket = fresh(200, max_tokens=400), stage.legs.ticket()
        decoding = stage.legs.decode_legs(session, prompt, ticket)
        assert (await stage.legs.prefill_leg(session, prompt, ticket)).is_ok

        async def is_over() -> bool:
            return all(
                [
                    await count(session, d, FINISHED) > before[policy]
                    for policy, d in stage.legs.decoders.items()
                ]
            )

        await until("the KV is there", is_over)
        for task in decoding.values():
            assert not task.done()
            task.cancel()
        await canaries.check(session, *stage.legs.decoders.values())
        await stage.settle(session)
        assert await count_now(session, stage.legs.p, EXPIRED) == expired

    play(story, stage, plain)


@any_transport
def test_a_p_that_stops_for_a_moment_costs_nothing(stage: Stage, plain: Engine) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.partial_push(session) as begun:
            stage.continue_p()
            answers = [await task for task in begun.decoding.values()]
            assert answers == [await ask(session, plain, begun.prompt)] * len(answers), [
                answer.body for answer in answers
            ]

    play(story, stage, plain)


def test_a_p_that_stops_for_long_writes_into_nobodys_blocks_when_it_goes_on(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    play(lambda session: stop_for_long(session, stage, plain, canaries), stage, plain)


async def stop_for_long(
    session: aiohttp.ClientSession, stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async with stage.partial_push(session) as begun:
        await assert_all_ended_well(
            begun.decoding, await ask(session, plain, begun.prompt), *SILENCE
        )
        async with canaries.fill(session, *stage.legs.decoders.values()):
            stage.continue_p()
            await asyncio.gather(begun.prefilling, return_exceptions=True)


def test_what_nixl_still_sends_between_hosts_when_p_goes_on_reaches_nobodys_blocks(
    tmp_path: Path, model: Path, plain: Engine, canaries: Canaries
) -> None:
    """UCX may end P when P continues (docs/faults.md). The test then starts P again."""
    with Stage.between_hosts("nixl", tmp_path, model) as stage:

        async def story(session: aiohttp.ClientSession) -> None:
            await stop_for_long(session, stage, plain, canaries)
            await stage.legs.replace_p_if_dead()

        play(story, stage, plain)


@any_transport
def test_a_p_that_is_killed_is_replaced_by_its_next_life(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.partial_push(session) as begun:
            right = await ask(session, plain, begun.prompt)
            stage.kill_p()
            await assert_all_ended_well(
                begun.decoding, right, "reading from the producer failed", "handshake", *SILENCE
            )
            await canaries.check(session, *stage.legs.decoders.values())
        await stage.legs.replace_p()

    play(story, stage, plain)


@any_transport
def test_a_d_that_is_killed_costs_p_one_lease_and_another_d_nothing(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.partial_push(session) as begun:
            stage.legs.decoders["fail"].kill()
            stage.continue_p()
            assert await begun.decoding["recompute"] == await ask(session, plain, begun.prompt)
            await until("P is free", lambda: is_free(session, stage.legs.p))
            await canaries.check(session, stage.legs.decoders["recompute"])
        stage.legs.replace_d("fail")

    play(story, stage, plain)


def test_a_lease_that_runs_out_in_the_middle_brings_no_wrong_token(
    stage: Stage, plain: Engine, canaries: Canaries
) -> None:
    """Both D are stopped until P has computed the rest, waited for them, and given the blocks to
    other requests. Then both D continue.
    """

    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.partial_push(session) as begun:
            right, decoders = await ask(session, plain, begun.prompt), stage.legs.decoders
            for d in decoders.values():
                d.pause()
            stage.continue_p()
            try:
                expired = await count_now(session, stage.legs.p, EXPIRED)
                assert (await begun.prefilling).is_ok
                await until("the lease has run out", lambda: is_free(session, stage.legs.p))
                assert await count_now(session, stage.legs.p, EXPIRED) > expired
                for _ in range(4):
                    assert (await ask(session, stage.legs.p, fresh(LONG))).is_ok
            finally:
                for d in decoders.values():
                    d.resume()
            # If P takes longer than D's own 10 s, D's wait for the next offer ends first.
            reasons = "lease", "no longer has", "read did not finish", "made no progress"
            await assert_all_ended_well(begun.decoding, right, *reasons, *SILENCE)
            for d in decoders.values():
                assert await ask(session, d, begun.prompt) == right, (
                    "D's prefix cache is not poisoned either"
                )
            await canaries.check(session, *decoders.values())

    play(story, stage, plain)


def test_blocks_that_are_written_from_outside_kill_a_canary(
    cluster: Cluster, canaries: Canaries
) -> None:
    """The negative control of everything above. It writes into three of the 48 blocks, because one
    block may happen to have no owner at that moment.
    """
    d = cluster.serve(
        "decode", *SMALL, extra={"transports": ["shm"], "enable_cross_layers_blocks": True}
    ).ready()

    async def disturbed(session: aiohttp.ClientSession) -> None:
        async with canaries.fill(session, d):
            disturb(d, 10, 20, 30)

    async def check() -> None:
        async with new_session() as session:
            await canaries.check(session, d)
            with pytest.raises(AssertionError, match="a canary died"):
                await disturbed(session)

    asyncio.run(check())


def test_clients_that_leave_before_during_and_after_leave_nothing_behind(
    cluster: Cluster, plain: Engine
) -> None:
    """Leases are ten minutes, so blocks that are free were released. Meanwhile other requests use
    the released blocks.
    """
    small = ("--num-gpu-blocks-override", "80", "--max-num-batched-tokens", "64")
    legs = Legs.start(cluster, Shape({**PATIENT, "transports": ["shm"]}, small, small))
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

    async def check() -> None:
        right = await ask_all(plain, prompts)
        async with new_session() as session:
            for first in range(0, len(prompts), 4):
                leaving = asyncio.gather(*(leave(session) for _ in range(3)))
                staying = (
                    legs.hand_over(session, legs.decoders["fail"], prompt)
                    for prompt in prompts[first : first + 4]
                )
                assert await asyncio.gather(*staying) == right[first : first + 4]
                await leaving
            assert await count(session, legs.p, "kvferry:kv_expired_reqs_total") == 0
            # One block is still used: the test left the first answer's block to its lease.
            await until("P has given back all else", lambda: _has_used(session, legs.p, 1))
            await until("D has given back all", lambda: is_free(session, legs.decoders["fail"]))

    asyncio.run(check())


async def _has_used(session: aiohttp.ClientSession, engine: Engine, blocks: int) -> bool:
    return (await metrics(session, engine))["kvferry:num_used_blocks"] == blocks


def test_prefills_that_are_cut_into_chunks_and_preempted_give_the_right_tokens(
    cluster: Cluster, plain: Engine
) -> None:
    """P also generates for two earlier requests, which take the blocks that they need from prefills
    that D is reading.
    """
    small = ("--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "64")
    p = cluster.serve(
        "prefill", *small, extra={**PATIENT, "transports": ["shm"]}, connector="NixlPushConnector"
    )
    d = cluster.serve(
        "decode", extra={**PATIENT, "transports": ["shm"]}, connector="NixlPushConnector"
    )
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
            assert (await metrics(session, engines[1]))["kvferry:transfers_total/shm"] > 2 * len(
                prompts
            ), "most came in several reads"
            await assert_quiescent(session, *engines)

    asyncio.run(check())
