"""Tests cables that are cut, reconnected or slow between engines on separate hosts: a cut acts like
the death of the peer, and after the reconnection everything works again.

Two D, one per failure policy, read from one P over plain TCP. `test_nixl_network.py` tests what
NIXL guarantees over TCP.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import aiohttp
import pytest
from tests.e2e.conftest import NETWORKED, Network
from tests.e2e.handovers import (
    FAILED,
    FINISHED,
    assert_ended_well,
    assert_recovers,
    count,
    fresh,
    hand_over,
    is_free,
    is_loading,
)
from tests.e2e.harness import (
    Answer,
    Engine,
    Prompt,
    ask,
    ask_all,
    assert_quiescent,
    new_session,
    prefill,
    until,
)

pytestmark = pytest.mark.slow

LONG = 600
"""Prompt length in tokens, 4 KiB each: several seconds at the rates below."""
SOME_BYTES = 300_000
ATTEMPTS = 5
SILENCE = "no longer answers heartbeats", "was lost"
EXPIRED = "kvferry:kv_expired_reqs_total"

Story = Callable[[aiohttp.ClientSession], Awaitable[None]]


def play(story: Story, network: Network, plain: Engine) -> None:
    """Run a story; then check that every D can fetch from P again and that every block is free."""

    async def whole() -> None:
        async with new_session() as session:
            await story(session)
            for d in network.decoders.values():
                await assert_recovers(session, network.p, d, plain)
            await assert_quiescent(session, network.p, *network.decoders.values())

    try:
        asyncio.run(whole())
    except BaseException:
        for engine in (network.p, *network.decoders.values()):
            print(
                "\n".join([f"last log lines of {engine.process.name}:", *engine.process.tail(30)])
            )
        raise


async def warm(session: aiohttp.ClientSession, network: Network) -> None:
    """Let every D fetch from P once, so that it knows P."""
    for d in network.decoders.values():
        assert (await hand_over(session, network.p, d, fresh())).is_ok


async def begin(
    session: aiohttp.ClientSession, network: Network, prompts: dict[str, Prompt]
) -> dict[str, asyncio.Task[Answer]]:
    """Start the requests. Each decode leg follows its prefill leg at once, because P's leases are
    short.
    """
    return {
        policy: asyncio.create_task(hand_over(session, network.p, d, prompts[policy]))
        for policy, d in network.decoders.items()
    }


async def begin_reads(
    session: aiohttp.ClientSession, network: Network, prompts: dict[str, Prompt]
) -> dict[str, asyncio.Task[Answer]]:
    """Start both legs and wait until P has sent enough bytes that the reads are in progress. On a
    busy machine a lease may expire before that; then try again.
    """
    for _ in range(ATTEMPTS):
        sent = network.hosts[0].sent_bytes()
        begun = await begin(session, network, prompts)

        async def has_moved(tasks: list[asyncio.Task[Answer]], sent: int) -> bool:
            has_sent = network.hosts[0].sent_bytes() > sent + SOME_BYTES
            return any(task.done() for task in tasks) or (
                has_sent and await is_loading(session, network.decoders.values())
            )

        await until("bytes are moving", partial(has_moved, [*begun.values()], sent))
        if not any(task.done() for task in begun.values()):
            return begun
        await asyncio.gather(*begun.values())
    raise AssertionError("no read was seen under way")


async def cut_during_reads(
    session: aiohttp.ClientSession, network: Network, plain: Engine, *freed: Engine
) -> None:
    """Cut P's cable while both D read. Check during the cut that their requests end and that the
    engines in `freed` have all blocks free; then reconnect the cable.
    """
    await warm(session, network)
    prompts = {policy: fresh(LONG) for policy in network.decoders}
    right = await right_answers(plain, prompts)
    with network.throttled("4mbit"):
        reading = await begin_reads(session, network, prompts)
        with network.cut():
            for policy, task in reading.items():
                assert_ended_well(await task, right[policy], policy, *SILENCE)
            # D's blocks are free only if the bytes of the interrupted reads can no longer arrive.
            await assert_quiescent(session, *freed)


async def right_answers(plain: Engine, prompts: dict[str, Prompt]) -> dict[str, Answer]:
    return dict(zip(prompts, await ask_all(plain, list(prompts.values())), strict=True))


def test_a_cable_cut_before_the_read_is_as_the_death_of_p_and_heals(
    network: Network, plain: Engine
) -> None:
    """The first request finds that a known peer is silent, the second cannot complete a handshake;
    P's leases expire while P is unreachable.
    """

    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        expired = await count(session, network.p, EXPIRED)
        prompts = [{policy: fresh() for policy in network.decoders} for _ in range(2)]
        params = [
            {policy: await prefill(session, network.p, prompt) for policy, prompt in part.items()}
            for part in prompts
        ]
        with network.cut():
            for part, tickets, reasons in zip(
                prompts, params, (SILENCE, ("did not answer the handshake", *SILENCE)), strict=True
            ):
                right = await right_answers(plain, part)
                asked = (
                    ask(session, d, part[policy], kv_transfer_params=tickets[policy])
                    for policy, d in network.decoders.items()
                )
                for policy, answer in zip(
                    network.decoders, await asyncio.gather(*asked), strict=True
                ):
                    assert_ended_well(answer, right[policy], policy, *reasons)
            await assert_quiescent(session, network.p, *network.decoders.values())
            assert await count(session, network.p, EXPIRED) == expired + 4

    play(story, network, plain)


def test_a_cable_cut_during_the_read_frees_both_sides_while_it_is_cut(
    network: Network, plain: Engine
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await cut_during_reads(session, network, plain, network.p, *network.decoders.values())

    play(story, network, plain)


def test_a_cable_cut_after_the_read_disturbs_no_answer(network: Network, plain: Engine) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        prompts = {policy: fresh(max_tokens=200) for policy in network.decoders}
        right = await right_answers(plain, prompts)
        before = {
            policy: await count(session, d, FINISHED) for policy, d in network.decoders.items()
        }
        decoding = await begin(session, network, prompts)

        async def is_read() -> bool:
            return all(
                [
                    await count(session, d, FINISHED) > before[policy]
                    for policy, d in network.decoders.items()
                ]
            )

        await until("the KV is there", is_read)
        with network.cut():
            for policy, task in decoding.items():
                assert await task == right[policy]

    play(story, network, plain)


def test_a_read_slower_than_its_lease_is_kept_alive_by_heartbeats(
    network: Network, plain: Engine
) -> None:
    """At this rate two reads of 2.4 MB take twice as long as the lease."""

    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        prompts = {policy: fresh(LONG) for policy in network.decoders}
        right = await right_answers(plain, prompts)
        expired = await count(session, network.p, EXPIRED)
        failed = [await count(session, d, FAILED) for d in network.decoders.values()]
        sent = network.hosts[0].sent_bytes()
        with network.throttled("2mbit"):
            reading = await begin(session, network, prompts)
            for policy, task in reading.items():
                answer = await task
                assert answer == right[policy], answer.body
        assert network.hosts[0].sent_bytes() - sent > 2 * LONG * 4096
        assert [await count(session, d, FAILED) for d in network.decoders.values()] == failed
        assert await count(session, network.p, EXPIRED) == expired

    play(story, network, plain)


def test_a_read_slower_than_its_deadline_ends_by_it(network: Network, plain: Engine) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        prompts = {policy: fresh(LONG) for policy in network.decoders}
        right = await right_answers(plain, prompts)
        with network.throttled("500kbit"):
            for policy, task in (await begin(session, network, prompts)).items():
                assert_ended_well(
                    await task,
                    right[policy],
                    policy,
                    f"did not finish within {NETWORKED['read_timeout']} s",
                )

    play(story, network, plain)


def test_p_killed_during_the_read_is_replaced_by_its_next_life(
    network: Network, plain: Engine
) -> None:
    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        prompts = {policy: fresh(LONG) for policy in network.decoders}
        right = await right_answers(plain, prompts)
        with network.throttled("4mbit"):
            reading = await begin_reads(session, network, prompts)
            network.replace_p()
            for policy, task in reading.items():
                assert_ended_well(
                    await task, right[policy], policy, "reading from the producer failed", *SILENCE
                )

    play(story, network, plain)


def test_p_killed_behind_a_cut_cable_leaves_half_open_connections_that_harm_nobody(
    network: Network, plain: Engine
) -> None:
    """No TCP reset can reach D: its connections look intact but lead nowhere."""

    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        with network.cut():
            network.replace_p()

    play(story, network, plain)


def test_a_lease_that_runs_out_during_the_read_is_refused_never_read_wrong(
    network: Network, plain: Engine
) -> None:
    """Both D are stopped in the middle of a read until P has reused the blocks for other prompts;
    then D continues and reads the new contents.
    """

    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        prompts = {policy: fresh(LONG) for policy in network.decoders}
        right = await right_answers(plain, prompts)
        expired = await count(session, network.p, EXPIRED)
        with network.throttled("4mbit"):
            reading = await begin_reads(session, network, prompts)
            for d in network.decoders.values():
                d.pause()
            try:
                await until("the leases have run out", lambda: is_free(session, network.p))
                assert await count(session, network.p, EXPIRED) == expired + 2
                for _ in range(4):
                    assert (await ask(session, network.p, fresh(LONG))).is_ok
            finally:
                for d in network.decoders.values():
                    d.resume()
        for policy, task in reading.items():
            assert_ended_well(
                await task,
                right[policy],
                policy,
                "lease",
                "heartbeats",
                "was lost",
                "read did not finish",
            )
            # D's prefix cache holds no wrong block either.
            assert await ask(session, network.decoders[policy], prompts[policy]) == right[policy]

    play(story, network, plain)


def test_d_cut_off_costs_p_nothing_but_one_lease(network: Network, plain: Engine) -> None:
    """The other D is not affected."""

    async def story(session: aiohttp.ClientSession) -> None:
        await warm(session, network)
        prompt = fresh()
        params = await prefill(session, network.p, prompt)
        with network.cut(host=1):
            answer = await ask(session, network.decoders["fail"], prompt, kv_transfer_params=params)
            assert_ended_well(answer, Answer(200), "fail", *SILENCE)
            other = fresh()
            failed = await count(session, network.decoders["recompute"], FAILED)
            assert await hand_over(
                session, network.p, network.decoders["recompute"], other
            ) == await ask(session, plain, other)
            assert await count(session, network.decoders["recompute"], FAILED) == failed
            await assert_quiescent(session, network.p)

    play(story, network, plain)
