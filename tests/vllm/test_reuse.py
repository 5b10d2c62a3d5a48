"""Tests conversations between real vLLM servers behind kvferry's router: P fetches from D the KV
that it lacks, and every answer is that of a single vLLM.

P has no prefix cache, so it lacks the KV of all earlier turns. Without transfer parameters, P is
also the single vLLM for the comparison.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.e2e.harness import Engine, Prompt, ask, metrics, new_session, post, prefill, until
from tests.ports import reserve_ports
from tests.vllm.abused_cluster import kill
from tests.vllm.documented import documented
from tests.vllm.fleet import Fleet, ready
from tests.vllm.right import BYTES_PER_TOKEN
from tests.vllm.vllm_asking import stream

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
ANSWER_TOKENS = 24
EAGER = {"kv_recompute_threshold": 0, "kv_lease_duration": 600}
UNCACHED = "--no-enable-prefix-caching"
PULLED, BYTES = "kvferry:reuse_loaded_tokens_total", "kvferry:reuse_loaded_bytes_total"
KEPT, EVICTED, LAPSED = (
    "kvferry:retained_turns_total",
    "kvferry:retained_turns_evicted_total",
    "kvferry:retained_turns_expired_total",
)
REFUSED = "kvferry:reuse_skipped_refused_total"
CALM_S, IDLE_S, MAX_CORE = 4.5, 5.0, 0.3
"""How long after the last request idle engines are watched, for how long, and how much of a core
they may use: an engine that steps all the time uses a whole one. vLLM's ranks alone are busy for a
second after each step, and steps become rare only after some seconds.
"""

_rng = random.Random(60)
_names = count()


def says(length: int = 40) -> tuple[int, ...]:
    """Return random tokens that no conversation has contained before."""
    return tuple(_rng.randrange(10, 500) for _ in range(length))


@dataclass(frozen=True)
class Scene:
    fleet: Fleet
    p: Engine
    d: Engine
    router: Engine


@dataclass(frozen=True)
class Told:
    """The result of one turn."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    num_pulled: int
    """Tokens that P fetched."""
    num_bytes: int
    num_computed: int
    """Tokens that P computed."""

    @property
    def num_kept(self) -> int:
        """Tokens that D retains: all but the last, whose KV D never computes."""
        return len(self.prompt) + len(self.answer) - 1


async def counted(session: aiohttp.ClientSession, p: Engine) -> tuple[int, int, int]:
    """Return P's counters: tokens fetched, bytes fetched, tokens computed."""
    async with session.get(f"{p.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    [computed] = [
        line
        for line in lines
        if line.startswith("vllm:prompt_tokens_by_source_total") and '"local_compute"' in line
    ]
    seen = await metrics(session, p)
    return int(seen[PULLED]), int(seen[BYTES]), int(float(computed.rpartition(" ")[2]))


async def take_turn(
    session: aiohttp.ClientSession, scene: Scene, name: str, prompt: tuple[int, ...]
) -> Told:
    """Send one streamed turn; the answer is not checked. P must get no other request meanwhile,
    because its counters would include that request.
    """
    before = await counted(session, scene.p)
    answer = await stream(
        session, scene.router, Prompt(prompt, ANSWER_TOKENS), conversation_id=name
    )
    return Told(
        prompt,
        answer,
        *(now - then for now, then in zip(await counted(session, scene.p), before, strict=True)),
    )


async def alone(
    session: aiohttp.ClientSession, p: Engine, prompt: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the answer of one vLLM that computes everything itself."""
    return (await ask(session, p, Prompt(prompt, ANSWER_TOKENS))).token_ids[0]


@asynccontextmanager
async def talking(scene: Scene) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """Yield a session and the name of a new conversation, once P fetches turns from D, so that all
    members know each other.
    """
    async with new_session(120) as session:

        async def is_fetched() -> bool:
            name, prompt = f"warm {next(_names)}", says(40)
            for _ in range(2):
                told = await take_turn(session, scene, name, prompt)
                prompt = told.prompt + told.answer + says(5)
            return told.num_pulled > 0

        await until("turns are fetched", is_fetched, 60)
        yield session, f"talk {next(_names)}"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Scene]:
    for_p, for_d = documented("Conversations")
    with Fleet(tmp_path_factory.mktemp("reuse"), model) as fleet:
        p = fleet.vllm("prefill", UNCACHED, transfer=for_p.transfer, extra=EAGER)
        d = fleet.vllm("decode", transfer=for_d.transfer, extra=EAGER, cores="1")
        ready(p, d)
        router = fleet.kvferry_router([p], [d])
        ready(router)
        yield Scene(fleet, p, d, router)


def test_the_side_channel_is_on_the_page_before_anybody_asks_anything(scene: Scene) -> None:
    async def check() -> None:
        async with new_session() as session:
            for engine in (scene.p, scene.d):
                assert (await metrics(session, engine))["kvferry:side_channel"] == 1

    asyncio.run(check())


def test_of_six_turns_p_computes_only_what_is_new(scene: Scene) -> None:
    async def check() -> None:
        async with talking(scene) as (session, name):
            before = await take_turn(session, scene, name, says(100))
            assert (before.num_pulled, before.num_computed) == (0, 100)
            for _ in range(5):
                told = await take_turn(session, scene, name, before.prompt + before.answer + says())
                assert told.num_pulled == before.num_kept
                assert told.num_bytes == -(-before.num_kept // BLOCK) * BLOCK * BYTES_PER_TOKEN
                assert told.num_computed == len(told.prompt) - before.num_kept
                assert told.answer == await alone(session, scene.p, told.prompt)
                before = told
            seen = await metrics(session, scene.p)
            assert (
                seen["kvferry:failed_loads_total"],
                seen["kvferry:reuse_failed_loads_total"],
            ) == (0, 0)

    asyncio.run(check())


async def stream_until_done(
    session: aiohttp.ClientSession, answers: AsyncExitStack, engine: Engine, body: dict[str, Any]
) -> tuple[int, ...]:
    """Stream a completion and return its tokens as soon as `[DONE]` has arrived, as clients do;
    `answers` keeps the connection open.
    """
    tokens: list[int] = []
    response = await answers.enter_async_context(
        session.post(f"{engine.url}/v1/completions", json={**body, "stream": True})
    )
    assert response.status == 200, await response.text()
    async for line in response.content:
        if line.strip() == b"data: [DONE]":
            return tuple(tokens)
        if line.startswith(b"data: "):
            choices = json.loads(line[6:])["choices"]
            tokens += [token for choice in choices for token in choice["token_ids"] or ()]
    raise AssertionError("the stream has no end")


def test_streamed_turns_under_load_find_the_last_one(scene: Scene) -> None:
    num_talks, num_turns = 8, 5

    async def found(session: aiohttp.ClientSession) -> Counter[str]:
        """Return how many turns have found the last one, and how many have not."""
        async with session.get(f"{scene.router.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        named = [line.split() for line in lines if line.startswith("kvferry:router_turns_total{")]
        return Counter({name.split('"')[1]: int(float(value)) for name, value in named})

    async def converse(session: aiohttp.ClientSession) -> None:
        name, prompt = f"talk {next(_names)}", says(60)
        async with AsyncExitStack() as answers:
            for _ in range(num_turns):
                body = {**Prompt(prompt, ANSWER_TOKENS).body(), "conversation_id": name}
                answer = await stream_until_done(session, answers, scene.router, body)
                prompt += answer + says(20)
        assert answer == await alone(session, scene.p, prompt[: -len(answer) - 20])

    async def check() -> None:
        async with talking(scene) as (session, _):
            before = await found(session)
            await asyncio.gather(*(converse(session) for _ in range(num_talks)))
            assert await found(session) - before == {
                "yes": num_talks * (num_turns - 1),
                "no": num_talks,
            }

    asyncio.run(check())


def cpu_s(engine: Engine) -> float:
    """Return the CPU time of all processes of an engine so far."""
    times = [process.cpu_times() for process in engine.family()]
    return float(sum(each.user + each.system for each in times))


def test_engines_that_only_hold_blocks_for_their_peers_are_idle(scene: Scene) -> None:
    async def check() -> None:
        async with talking(scene) as (session, name):
            await take_turn(session, scene, name, says(100))
            prompts = [Prompt(says(100), 4) for _ in range(4)]
            tickets = [await prefill(session, scene.p, prompt) for prompt in prompts]

            async def holds() -> bool:
                p, d = await metrics(session, scene.p), await metrics(session, scene.d)
                return p["kvferry:num_leases"] == 4 and d["kvferry:num_retained_turns"] > 0

            await until("both engines hold blocks", holds)
            engines = (scene.p, scene.d)
            await asyncio.sleep(CALM_S)
            before, began = [cpu_s(engine) for engine in engines], time.monotonic()
            await asyncio.sleep(IDLE_S)
            watched_s = time.monotonic() - began
            for engine, spent_s in zip(engines, before, strict=True):
                used = (cpu_s(engine) - spent_s) / watched_s
                assert used < MAX_CORE, (engine.process.name, used)
            # They still hold the blocks, and what is held is as good as before.
            for prompt, ticket in zip(prompts, tickets, strict=True):
                got = await ask(session, scene.d, prompt, kv_transfer_params=ticket)
                assert got == await ask(session, scene.p, prompt), got.body

            async def is_free() -> bool:
                return (await metrics(session, scene.p))["kvferry:num_leases"] == 0

            await until("P has noticed that D has fetched everything", is_free)

    asyncio.run(check())


def without_thoughts(told: Told) -> tuple[int, ...]:
    """Remove a segment from the middle of the answer, as a client that strips the model's
    thinking.
    """
    return told.prompt + told.answer[:3] + told.answer[11:] + says()


def edited(told: Told) -> tuple[int, ...]:
    return told.prompt[:70] + says(5) + told.prompt[75:] + told.answer + says()


def led_otherwise(told: Told) -> tuple[int, ...]:
    """Use another system prompt."""
    return says(7) + told.prompt[7:] + told.answer + says()


def retokenised(told: Told) -> tuple[int, ...]:
    """Replace one token of the answer, as when the same text becomes other tokens."""
    another = 10 + (told.answer[-12] + 1) % 490
    return told.prompt + told.answer[:-12] + (another,) + told.answer[-11:] + says()


def cut_short(told: Told) -> tuple[int, ...]:
    return told.prompt[:50]


@pytest.mark.parametrize(
    "change", [without_thoughts, edited, led_otherwise, retokenised, cut_short]
)
def test_only_what_both_texts_have_in_common_is_fetched(
    scene: Scene, change: Callable[[Told], tuple[int, ...]]
) -> None:
    async def check() -> None:
        async with talking(scene) as (session, name):
            first = await take_turn(session, scene, name, says(100))
            prompt = change(first)
            said = first.prompt + first.answer
            common = next(
                (i for i, (a, b) in enumerate(zip(said, prompt, strict=False)) if a != b),
                min(len(said), len(prompt)),
            )
            told = await take_turn(session, scene, name, prompt)
            assert told.num_pulled == common // BLOCK * BLOCK
            assert told.answer == await alone(session, scene.p, prompt)
            # The conversation continues from the changed text.
            third = await take_turn(session, scene, name, told.prompt + told.answer + says())
            assert third.num_pulled == told.num_kept
            assert third.answer == await alone(session, scene.p, third.prompt)

    asyncio.run(check())


def test_chats_go_on_whatever_becomes_of_the_text(scene: Scene) -> None:
    """Chats that are not streamed: the answer returns as text, in the tokens that the tokenizer
    makes of it; the second answer has a space appended, the third lacks its first half.
    """

    def body(messages: list[dict[str, str]]) -> dict[str, Any]:
        return {
            "model": "tiny",
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }

    async def check() -> None:
        async with talking(scene) as (session, name):
            messages = [{"role": "system", "content": "You know all transfer workers. " * 8}]
            changes: list[Callable[[str], str]] = [
                str,
                lambda text: text + " ",
                lambda text: text[len(text) // 2 :],
                str,
            ]
            for number, change in enumerate(changes):
                messages.append(
                    {"role": "user", "content": f"Where does ferry {number} of {name} go?"}
                )
                pulled, _, _ = await counted(session, scene.p)
                through = await post(
                    session,
                    scene.router,
                    {**body(messages), "conversation_id": name},
                    "/v1/chat/completions",
                )
                assert through.is_ok, through.body
                assert "kv_transfer_params" not in through.body
                assert ((await counted(session, scene.p))[0] > pulled) is (number > 0)
                direct = await post(session, scene.p, body(messages), "/v1/chat/completions")
                assert through.body["choices"] == direct.body["choices"]
                messages.append(
                    {
                        "role": "assistant",
                        "content": change(through.body["choices"][0]["message"]["content"]),
                    }
                )

    asyncio.run(check())


def test_bytes_that_are_corrupted_between_d_and_p_change_the_tokens(scene: Scene) -> None:
    """The negative control of all these comparisons."""
    transfer = documented("Conversations")[0].transfer
    faults = {"KVFERRY_FAULTS": "corrupt:every=1"}
    p = scene.fleet.vllm(
        "corrupted prefill", UNCACHED, transfer=transfer, extra=EAGER, environment=faults
    )
    ready(p)
    router = scene.fleet.kvferry_router([p], [scene.d])
    ready(router)
    corrupted = Scene(scene.fleet, p, scene.d, router)

    async def check() -> None:
        async with talking(corrupted) as (session, name):
            first = await take_turn(session, corrupted, name, says(100))
            assert first.answer == await alone(session, scene.p, first.prompt)
            told = await take_turn(session, corrupted, name, first.prompt + first.answer + says())
            assert told.num_pulled == first.num_kept
            assert told.answer != await alone(session, scene.p, told.prompt)

    asyncio.run(check())
    scene.fleet.stop(router)
    scene.fleet.stop(p)


@pytest.mark.exhaustive
def test_kept_turns_give_way_run_out_and_die_with_their_keeper(scene: Scene) -> None:
    """D has so few blocks that it can retain less than half of what is said; its next incarnation
    retains turns for 1 s only.
    """
    transfer = {**documented("Conversations")[1].transfer, "engine_id": "small"}
    ports = reserve_ports(2)
    few = ("--num-gpu-blocks-override", "72")

    def start(**extra: Any) -> Engine:
        d = scene.fleet.vllm(
            "small decode",
            *few,
            transfer=transfer,
            extra={**EAGER, **extra},
            cores="1",
            ports=(ports[0], ports[1]),
        )
        ready(d)
        return d

    small = start()
    router = scene.fleet.kvferry_router([scene.p], [small])
    ready(router)

    async def converse(session: aiohttp.ClientSession) -> None:
        name, prompt = f"talk {next(_names)}", says(60)
        for _ in range(3):
            answer = await stream(
                session, router, Prompt(prompt, ANSWER_TOKENS), conversation_id=name
            )
            assert answer == await alone(session, scene.p, prompt)
            prompt += answer + says()

    async def crowd() -> None:
        async with talking(Scene(scene.fleet, scene.p, small, router)) as (session, _):
            pulled = (await metrics(session, scene.p))[PULLED]
            for _ in range(2):
                await asyncio.gather(*(converse(session) for _ in range(6)))
            seen = await metrics(session, small)
            assert (await metrics(session, scene.p))[PULLED] > pulled
            assert seen[KEPT] >= 36
            assert seen[EVICTED] > 0
            assert seen["vllm:num_preemptions_total"] == 0
            # A request that needs nearly the whole cache is served, too.
            large = Prompt(says(2000), 8)
            assert await ask(session, small, large) == await ask(session, scene.p, large)

    async def outlive(d: Engine) -> None:
        """Take the next turn of a conversation whose D was killed and replaced by a new
        incarnation.
        """
        async with new_session(120) as session:
            first = Prompt(says(100), ANSWER_TOKENS)
            made = await ask(
                session, scene.p, first, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
            )
            kept = (
                await ask(session, d, first, kv_transfer_params=made.body["kv_transfer_params"])
            ).body["kv_transfer_params"]
            name = f"talk {next(_names)}"
            before = await stream(session, router, first, conversation_id=name)
            kill(d)
            scene.fleet.stop(d)
            refused = (await metrics(session, scene.p))[REFUSED]
            prompt = first.token_ids + before + says()
            # Sent without the router, so that P certainly uses the ticket; D is not there to
            # answer.
            by_hand = await ask(session, scene.p, Prompt(prompt, 1), kv_transfer_params=kept)
            assert by_hand.token_ids[0] == (await alone(session, scene.p, prompt))[:1]
            assert (await metrics(session, scene.p))[REFUSED] == refused + 1
            new = await asyncio.to_thread(lambda: start(decoder_kv_blocks_ttl=1))
            by_hand = await ask(session, scene.p, Prompt(prompt, 1), kv_transfer_params=kept)
            assert by_hand.token_ids[0] == (await alone(session, scene.p, prompt))[:1]

            async def is_served() -> bool:
                body = {**Prompt(prompt, ANSWER_TOKENS).body(), "conversation_id": name}
                answer = await post(session, router, body)
                assert not answer.is_ok or answer.token_ids[0] == await alone(
                    session, scene.p, prompt
                )
                return answer.is_ok

            await until("the router has found the new D", is_served, 60)

            async def is_over() -> bool:
                seen = await metrics(session, new)
                return (
                    seen[LAPSED] == seen[KEPT] > 0
                    and seen["kvferry:num_retained_turns"] == seen["vllm:kv_cache_usage_perc"] == 0
                )

            await until("all kept turns have run out", is_over, 60)
            scene.fleet.stop(new)

    asyncio.run(crowd())
    asyncio.run(outlive(small))
    scene.fleet.stop(router)
