"""Tests turns of conversations with real engines: P fetches from D the KV that it lacks and
computes the rest, and the answers are those of a single engine even after faults.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.conftest import PATIENT, SHORT
from tests.e2e.conversations import (
    BLOCK,
    PULLED,
    Talk,
    Told,
    ask_side_channel,
    blocks,
    retained_turns,
    says,
    side_channel_of,
    stream,
    take_turn,
)
from tests.e2e.harness import Cluster, Engine, Prompt, ask, metrics, new_session, prefill, until
from tests.e2e.push_legs import Legs, Shape
from tests.e2e.test_bytes_moved import token_bytes

pytestmark = pytest.mark.slow

REUSE = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}
UNCACHED = "--no-enable-prefix-caching"
"""A P with this flag has no KV from earlier requests."""
REFUSED = "kvferry:reuse_skipped_refused_total"


@dataclass(frozen=True)
class Stage:
    cluster: Cluster
    uncached: Engine
    """A P without a prefix cache."""
    p: Engine
    d: Engine
    other: Engine
    """A second D."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Stage]:
    with Cluster(tmp_path_factory.mktemp("reuse"), model) as cluster:
        flags = {"uncached prefill": (UNCACHED,), "prefill": (), "decode": (), "other decode": ()}
        starting = [
            cluster.serve(name, *each, extra={**PATIENT, **REUSE}) for name, each in flags.items()
        ]
        yield Stage(cluster, *(process.ready() for process in starting))


async def count(session: aiohttp.ClientSession, engine: Engine, name: str) -> int:
    return int((await metrics(session, engine)).get(name, 0))


# -- what moves --


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_of_six_turns_p_computes_only_what_is_new(
    stage: Stage, plain: Engine, model: Path, is_streamed: bool
) -> None:
    async def check() -> None:
        async with new_session() as session:
            talk = Talk(plain)
            before = await talk.turn(session, stage.uncached, stage.d, is_streamed=is_streamed)
            assert (before.num_pulled, before.num_computed) == (0, len(before.prompt))
            for number in range(5):
                # A D that has not seen the conversation gets all of it from P, including what P
                # fetched.
                d = stage.other if not is_streamed and number % 2 == 0 else stage.d
                told = await talk.turn(session, stage.uncached, d, is_streamed=is_streamed)
                assert told.num_pulled == before.num_kept
                assert told.num_bytes == blocks(before.num_kept) * BLOCK * token_bytes(model)
                assert told.num_computed == len(told.prompt) - before.num_kept
                before = told
            assert await count(session, stage.uncached, "kvferry:failed_loads_total") == 0

    asyncio.run(check())


def test_what_p_remembers_itself_is_not_fetched(stage: Stage, plain: Engine, model: Path) -> None:
    async def check() -> None:
        async with new_session() as session:
            talk = Talk(plain)
            first = await talk.turn(session, stage.p, stage.d)
            second = await talk.turn(session, stage.p, stage.d)
            has = len(first.prompt) // BLOCK * BLOCK
            assert second.num_pulled == first.num_kept - has
            assert second.num_bytes == (
                blocks(first.num_kept) - has // BLOCK
            ) * BLOCK * token_bytes(model)
            assert second.num_computed == len(second.prompt) - first.num_kept

    asyncio.run(check())


def shortened(told: Told) -> tuple[int, ...]:
    """Remove a segment from the middle of the answer, as a client that strips the model's
    thinking.
    """
    return told.prompt + told.answer[:3] + told.answer[11:] + says()


def edited(told: Told) -> tuple[int, ...]:
    return told.prompt[:40] + says(5) + told.prompt[45:] + told.answer + says()


def led(told: Told) -> tuple[int, ...]:
    """Use another system prompt."""
    return says(7) + told.prompt[7:] + told.answer + says()


def retokenised(told: Told) -> tuple[int, ...]:
    """Replace the last two tokens of the answer by one, as when the same text becomes other tokens;
    all later tokens are then at other positions.
    """
    return told.prompt + told.answer[:-2] + says(1) + says()


def cut_short(told: Told) -> tuple[int, ...]:
    return told.prompt[:50]


@pytest.mark.parametrize("change", [shortened, edited, led, retokenised, cut_short])
def test_only_what_both_texts_have_in_common_is_fetched(
    stage: Stage, plain: Engine, change: Any
) -> None:
    async def check() -> None:
        async with new_session() as session:
            first = await Talk(plain).turn(session, stage.uncached, stage.d)
            prompt = change(first)
            said = first.prompt + first.answer
            common = next(
                (i for i, (a, b) in enumerate(zip(said, prompt, strict=False)) if a != b),
                min(len(said), len(prompt)),
            )
            # This D has nothing of the conversation: the KV that it answers from came through P.
            told = await take_turn(session, stage.uncached, stage.other, prompt, first.kept)
            assert told.num_pulled == min(common, first.num_kept) // BLOCK * BLOCK
            assert (
                told.answer
                == (await ask(session, plain, Prompt(tuple(prompt), max_tokens=24))).token_ids[0]
            )

    asyncio.run(check())


def test_bytes_that_are_corrupted_between_d_and_p_change_the_tokens(
    stage: Stage, plain: Engine
) -> None:
    """The negative control of all these comparisons."""
    p = stage.cluster.serve(
        "corrupted",
        UNCACHED,
        extra={**PATIENT, **REUSE},
        environment={"KVFERRY_FAULTS": "corrupt:every=1"},
    ).ready()

    async def check() -> None:
        async with new_session() as session:
            first = await Talk(plain).turn(session, p, stage.d)
            prompt = first.prompt + first.answer + says()
            told = await take_turn(session, p, stage.other, prompt, first.kept)
            assert told.num_pulled == first.num_kept
            assert (
                told.answer
                != (await ask(session, plain, Prompt(prompt, max_tokens=24))).token_ids[0]
            )

    asyncio.run(check())
    stage.cluster.dismiss(p.process)


@pytest.mark.parametrize("sides", ["both staged", "tp 2 to 1", "tp 1 to 2", "pushed"])
def test_engines_of_every_shape_go_on_from_each_other(
    cluster: Cluster, plain: Engine, sides: str
) -> None:
    extra, connector = (
        {**PATIENT, **REUSE, "force_host_buffer": sides == "both staged"},
        "NixlPushConnector" if sides == "pushed" else "NixlConnector",
    )
    sizes = {"tp 2 to 1": (1, 2), "tp 1 to 2": (2, 1)}.get(sides, (1, 1))
    names = {
        "prefill": (UNCACHED,),
        "decode": ("--block-size", "32") if sides == "tp 2 to 1" else (),
    }
    starting = [
        cluster.serve(
            name, *flags, "--tensor-parallel-size", str(size), extra=extra, connector=connector
        )
        for (name, flags), size in zip(names.items(), sizes, strict=True)
    ]
    p, d = (process.ready() for process in starting)

    async def check() -> None:
        async with new_session() as session:
            talk = Talk(plain)
            before = await talk.turn(session, p, d)
            for _ in range(2):
                told = await talk.turn(session, p, d)
                assert told.num_pulled == before.num_kept
                assert told.num_computed == len(told.prompt) - before.num_kept
                before = told
            assert await count(session, p, "kvferry:failed_loads_total") == 0
            await retained_turns(session, d, 1)

    asyncio.run(check())


def test_legs_that_start_together_go_on_from_what_was_kept(cluster: Cluster, plain: Engine) -> None:
    """P fetches from D while D waits for P; then P pushes the fetched and the computed KV
    together.
    """
    legs = Legs.start(cluster, Shape({**PATIENT, **REUSE}, p_flags=(UNCACHED,)))
    decoders = [legs.decoders["fail"], legs.decoders["recompute"]]

    async def check() -> None:
        async with new_session() as session:
            prompt, kept, num_kept = says(100), dict[str, Any](), 0
            for number in range(4):
                asked, ticket, before = (
                    Prompt(prompt, max_tokens=24),
                    legs.ticket(),
                    await count(session, legs.p, PULLED),
                )
                p_leg = {
                    **kept,
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "push_ticket": ticket,
                }
                d_leg = {"do_remote_prefill": True, "push_ticket": ticket, "conversation": "w"}
                first, answer = await asyncio.gather(
                    ask(session, legs.p, asked, max_tokens=1, kv_transfer_params=p_leg),
                    ask(session, decoders[number % 2], asked, kv_transfer_params=d_leg),
                )
                assert first.is_ok, first.body
                assert answer == await ask(session, plain, asked)
                assert await count(session, legs.p, PULLED) - before == num_kept
                kept, num_kept = answer.body["kv_transfer_params"], len(prompt) + 23
                prompt += answer.token_ids[0] + says()

    asyncio.run(check())


# -- which turns D retains, and whom it informs --


def test_nothing_is_kept_or_told_where_nobody_asked(stage: Stage) -> None:
    async def check() -> None:
        async with new_session() as session:
            before = await count(session, stage.d, "kvferry:retained_turns_total")
            prompt = Prompt(says(60), max_tokens=4)
            nothing = {**await prefill(session, stage.p, prompt), "conversation": None}
            assert (await ask(session, stage.d, prompt, kv_transfer_params=nothing)).body.get(
                "kv_transfer_params"
            ) is None
            several = {**await prefill(session, stage.p, prompt), "conversation": "w"}
            assert (await ask(session, stage.d, prompt, n=2, kv_transfer_params=several)).body.get(
                "kv_transfer_params"
            ) is None
            assert await count(session, stage.d, "kvferry:retained_turns_total") == before
            # As in vLLM, D retains the turn of a request that has no `conversation` parameter. When
            # streamed, D sends no event about it, because the client would not understand that
            # event.
            silent = await prefill(session, stage.p, prompt)
            _, told = await stream(
                session, stage.d, {**prompt.body(), "kv_transfer_params": silent}
            )
            assert told is None
            assert await count(session, stage.d, "kvferry:retained_turns_total") == before + 1

    asyncio.run(check())


def test_a_router_that_cannot_see_it_asks_the_side_channel(stage: Stage, plain: Engine) -> None:
    async def check() -> None:
        async with new_session() as session:
            told = await Talk(plain).turn(session, stage.uncached, stage.d, is_streamed=True)
            address = await side_channel_of(session, stage.d)
            found = await ask_side_channel(address, stage.cluster.secret, told.word)
            assert found is not None
            assert json.loads(found) == told.kept
            assert await ask_side_channel(address, stage.cluster.secret, "another word") == ""
            assert (
                await ask_side_channel(address, b"a secret of others", told.word, timeout_s=1)
                is None
            )

    asyncio.run(check())


def test_what_is_asked_of_one_that_does_not_fetch_is_computed_and_given_back(
    stage: Stage, plain: Engine
) -> None:
    """This applies to every P that was started without `bidirectional_kv_xfer`."""
    p = stage.cluster.serve("plain prefill", extra=PATIENT).ready()

    async def check() -> None:
        async with new_session() as session:
            talk = Talk(plain)
            await talk.turn(session, p, stage.other)
            kept = await count(session, stage.other, "kvferry:num_retained_turns")
            assert (await talk.turn(session, p, stage.d)).num_pulled == 0
            await retained_turns(session, stage.other, kept - 1)

    asyncio.run(check())
    stage.cluster.dismiss(p.process)


# -- faults --


def test_tickets_that_are_bad_used_up_or_our_own_cost_nothing_but_computing(
    stage: Stage, plain: Engine
) -> None:
    async def check() -> None:
        async with new_session() as session:
            first = await Talk(plain).turn(session, stage.uncached, stage.d)
            prompt = first.prompt + first.answer + says()
            right = (await ask(session, plain, Prompt(prompt, max_tokens=24))).token_ids[0]
            assert first.kept is not None
            # Not "AAAAAAAA=": a ticket ends with a float, whose last bytes may all be zero.
            for bad in ("", "A" * 500, first.kept["ticket"][:-9] + "BBBBBBBB=", 7, {"a": 1}):
                told = await take_turn(
                    session, stage.uncached, stage.d, prompt, {**first.kept, "ticket": bad}
                )
                assert (told.answer, told.num_pulled) == (right, 0)
            own = await take_turn(session, stage.d, stage.other, prompt, first.kept)
            assert (own.answer, own.num_pulled) == (right, 0)
            used = await take_turn(session, stage.uncached, stage.d, prompt, first.kept)
            assert (used.answer, used.num_pulled) == (right, 0)

    asyncio.run(check())


def test_many_conversations_in_a_small_cache_take_turns_and_nobody_is_preempted(
    stage: Stage, plain: Engine
) -> None:
    """D has 40 blocks and a turn retains 9 or more: D evicts the oldest turns, P fetches the
    others, and every answer is right.
    """
    d = stage.cluster.serve(
        "small decode", "--num-gpu-blocks-override", "40", extra={**PATIENT, **REUSE}
    ).ready()

    async def converse(session: aiohttp.ClientSession, room: asyncio.Semaphore) -> int:
        talk, num_pulled = Talk(plain, history=says(60)), 0
        for _ in range(4):
            async with room:
                num_pulled += (
                    await talk.turn(session, stage.uncached, d, is_streamed=True)
                ).num_pulled
        return num_pulled

    async def check() -> None:
        # Two turns of at most 18 blocks each fit into the cache together, so any preemption would
        # be caused by retained turns.
        room = asyncio.Semaphore(2)
        async with new_session() as session:
            pulled = await asyncio.gather(*(converse(session, room) for _ in range(6)))
            assert sum(pulled) > 0
            assert await count(session, d, "kvferry:retained_turns_evicted_total") > 0
            assert await count(session, d, "vllm:num_preemptions_total") == 0
            # A request that needs the whole cache is served, too.
            large = Prompt(says(610), max_tokens=8)
            assert await ask(session, d, large) == await ask(session, plain, large)
            await retained_turns(session, d, 0)

    asyncio.run(check())
    stage.cluster.dismiss(d.process)


def test_a_turn_nobody_came_for_in_time_is_computed(stage: Stage, plain: Engine) -> None:
    d = stage.cluster.serve(
        "hasty decode", extra={**PATIENT, **REUSE, "decoder_kv_blocks_ttl": 1}
    ).ready()

    async def check() -> None:
        async with new_session() as session:
            talk, before = Talk(plain), await count(session, stage.uncached, REFUSED)
            await talk.turn(session, stage.uncached, d)
            await retained_turns(session, d, 0)
            assert (await talk.turn(session, stage.uncached, stage.d)).num_pulled == 0
            assert await count(session, stage.uncached, REFUSED) == before + 1
            found = await metrics(session, d)
            assert (
                found["kvferry:retained_turns_expired_total"],
                found["kvferry:kv_expired_reqs_total"],
            ) == (1, 0)

    asyncio.run(check())
    stage.cluster.dismiss(d.process)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_a_d_that_is_killed_costs_nothing_but_computing(
    stage: Stage, plain: Engine, moment: str
) -> None:
    """This is independent of the failure policy: the KV that D had would only have saved time."""
    late = {"KVFERRY_FAULTS": "delay:polls=30000"} if moment == "during" else {}
    starting = [
        stage.cluster.serve("late prefill", UNCACHED, extra={**SHORT, **REUSE}, environment=late),
        stage.cluster.serve("mortal decode", extra={**PATIENT, **REUSE}),
    ]
    p, d = (process.ready() for process in starting)

    async def check() -> None:
        async with new_session() as session:
            # The first turn uses a P whose transport is not delayed; this P computes everything
            # itself.
            first = await Talk(plain).turn(session, stage.p, d)
            prompt = first.prompt + first.answer + says()

            async def is_fetching() -> bool:
                return await count(session, p, "kvferry:num_requests_waiting_for_remote_kvs") > 0

            if moment == "before":
                d.kill()
            turn = asyncio.create_task(take_turn(session, p, stage.d, prompt, first.kept))
            if moment == "during":
                await until("P fetches", is_fetching)
                d.kill()
            told = await turn
            assert (
                told.answer
                == (await ask(session, plain, Prompt(prompt, max_tokens=24))).token_ids[0]
            )
            assert (told.num_pulled, told.num_computed) == (0, len(prompt))
            name = "kvferry:reuse_failed_loads_total" if moment == "during" else REFUSED
            assert await count(session, p, name) == 1

    asyncio.run(check())
    for engine in (p, d):
        stage.cluster.dismiss(engine.process)


def test_an_engine_that_drains_keeps_nothing_for_turns_that_will_not_come(
    stage: Stage, plain: Engine
) -> None:
    d = stage.cluster.serve(
        "leaving decode", "--drain-timeout", "600", extra={**PATIENT, **REUSE}
    ).ready()

    async def check() -> None:
        async with new_session() as session:
            await Talk(plain).turn(session, stage.uncached, d)
            for member in d.family():
                member.send_signal(signal.SIGTERM)
            await asyncio.to_thread(d.process.wait, 30.0)

    asyncio.run(check())
