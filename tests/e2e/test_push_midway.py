"""Whatever happens to P, D or the client in the middle of a push: right tokens or a clear error, and nobody else's tokens are wrong.

Right after each of these, canaries take every block of both D, and hold them while P, where it still lives, comes back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.canaries import SMALL, Canaries, disturb
from tests.e2e.handovers import FINISHED, count, fresh, is_free
from tests.e2e.harness import Cluster, Engine, ask, new_session, until
from tests.e2e.push_legs import EXPIRED, assert_all_ended_well
from tests.e2e.push_stage import LONG, Stage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SILENCE = "no longer answers heartbeats", "was lost"

Story = Callable[[aiohttp.ClientSession], Awaitable[None]]


@pytest.fixture(scope="module")
def canaries(plain: Engine) -> Canaries:
    return Canaries.hatch(plain)


@pytest.fixture(scope="module", params=["shm", "nixl", "tcp"])
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stage]:
    with Stage.opened(request.param, tmp_path_factory.mktemp("stage"), model) as made:
        yield made


def play(story: Story, stage: Stage, plain: Engine) -> None:
    """A story, then: every block is free, P and both D work together, with nothing restarted, and again every block is free."""

    async def whole() -> None:
        async with new_session() as session:
            await story(session)
            await stage.settle(session)
            for d in stage.legs.decoders.values():
                prompt, before = fresh(), await count(session, d, FINISHED)
                assert await stage.legs.hand_over(session, d, prompt) == await ask(session, plain, prompt)
                assert await count(session, d, FINISHED) == before + 1
            await stage.settle(session)

    try:
        asyncio.run(whole())
    except BaseException:
        for engine in stage.legs.engines:
            print("\n".join([f"last words of {engine.process.name}:", *engine.process.tail(30)]))
        raise


def test_clients_that_leave_before_the_transfer_leave_nothing_behind(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await stage.settle(session)
        expired = await count(session, stage.legs.p, EXPIRED)
        prompt, ticket = fresh(LONG), stage.legs.ticket()
        decoding = stage.legs.decode_legs(session, prompt, ticket)
        await stage.legs.until_registered(session, len(decoding))
        for task in decoding.values():
            task.cancel()
        async with canaries.fill(session, *stage.legs.decoders.values()):
            assert (await stage.legs.prefill_leg(session, prompt, ticket)).is_ok
        await stage.settle(session)
        assert await count(session, stage.legs.p, EXPIRED) == expired, "P was told, and did not wait for its lease"

    play(story, stage, plain)


def test_clients_that_leave_during_the_transfer_leave_nothing_behind(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    """P stands still: D has its blocks back without P's help."""

    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.midway(session) as begun:
            for task in begun.decoding.values():
                task.cancel()
            async with canaries.fill(session, *stage.legs.decoders.values()):
                stage.continue_p()
                assert (await begun.prefilling).is_ok

    play(story, stage, plain)


def test_clients_that_leave_after_the_transfer_leave_nothing_behind(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await stage.settle(session)
        expired = await count(session, stage.legs.p, EXPIRED)
        before = {policy: await count(session, d, FINISHED) for policy, d in stage.legs.decoders.items()}
        prompt, ticket = fresh(200, max_tokens=400), stage.legs.ticket()
        decoding = stage.legs.decode_legs(session, prompt, ticket)
        assert (await stage.legs.prefill_leg(session, prompt, ticket)).is_ok

        async def is_over() -> bool:
            return all([await count(session, d, FINISHED) > before[policy] for policy, d in stage.legs.decoders.items()])

        await until("the KV is there", is_over)
        for task in decoding.values():
            assert not task.done()
            task.cancel()
        await canaries.check(session, *stage.legs.decoders.values())
        await stage.settle(session)
        assert await count(session, stage.legs.p, EXPIRED) == expired

    play(story, stage, plain)


def test_a_p_that_stops_for_a_moment_costs_nothing(stage: Stage, plain: Engine) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.midway(session) as begun:
            right = await ask(session, plain, begun.prompt)
            stage.continue_p()
            for task in begun.decoding.values():
                assert await task == right

    play(story, stage, plain)


def test_a_p_that_stops_for_long_writes_into_nobodys_blocks_when_it_goes_on(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.midway(session) as begun:
            await assert_all_ended_well(begun.decoding, await ask(session, plain, begun.prompt), *SILENCE)
            async with canaries.fill(session, *stage.legs.decoders.values()):
                stage.continue_p()
                await asyncio.gather(begun.prefilling, return_exceptions=True)

    play(story, stage, plain)


def test_a_p_that_is_killed_is_replaced_by_its_next_life(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.midway(session) as begun:
            right = await ask(session, plain, begun.prompt)
            stage.kill_p()
            await assert_all_ended_well(begun.decoding, right, "reading from the producer failed", *SILENCE)
            await canaries.check(session, *stage.legs.decoders.values())
        await stage.legs.replace_p()

    play(story, stage, plain)


def test_a_d_that_is_killed_costs_p_one_lease_and_another_d_nothing(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.midway(session) as begun:
            stage.legs.decoders["fail"].kill()
            stage.continue_p()
            assert await begun.decoding["recompute"] == await ask(session, plain, begun.prompt)
            await until("P is free", lambda: is_free(session, stage.legs.p))
            await canaries.check(session, stage.legs.decoders["recompute"])
        stage.legs.replace_d("fail")

    play(story, stage, plain)


def test_a_lease_that_runs_out_in_the_middle_brings_no_wrong_token(stage: Stage, plain: Engine, canaries: Canaries) -> None:
    """Both D stand still until P has computed the rest, waited for them, and given the blocks to others. Then they go on."""

    async def story(session: aiohttp.ClientSession) -> None:
        async with stage.midway(session) as begun:
            right, decoders = await ask(session, plain, begun.prompt), stage.legs.decoders
            for d in decoders.values():
                d.pause()
            stage.continue_p()
            try:
                expired = await count(session, stage.legs.p, EXPIRED)
                assert (await begun.prefilling).is_ok
                await until("the lease has run out", lambda: is_free(session, stage.legs.p))
                assert await count(session, stage.legs.p, EXPIRED) == expired + 1
                for _ in range(4):
                    assert (await ask(session, stage.legs.p, fresh(LONG))).is_ok
            finally:
                for d in decoders.values():
                    d.resume()
            await assert_all_ended_well(begun.decoding, right, "lease", "heartbeats", "was lost", "read did not end")
            for d in decoders.values():
                assert await ask(session, d, begun.prompt) == right, "D's prefix cache is not poisoned either"
            await canaries.check(session, *decoders.values())

    play(story, stage, plain)


def test_blocks_that_are_written_from_outside_kill_a_canary(cluster: Cluster, canaries: Canaries) -> None:
    """The negative control of everything above. Three blocks of 48: one may happen to be between two owners."""
    d = cluster.serve("decode", *SMALL, extra={"planes": ["shm"], "enable_cross_layers_blocks": True}).ready()

    async def disturbed(session: aiohttp.ClientSession) -> None:
        async with canaries.fill(session, d):
            disturb(d, 10, 20, 30)

    async def check() -> None:
        async with new_session() as session:
            await canaries.check(session, d)
            with pytest.raises(AssertionError, match="a canary died"):
                await disturbed(session)

    asyncio.run(check())
