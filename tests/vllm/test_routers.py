"""Tests the same P and D behind three routers: ours, one like upstream's toy proxy, and
vllm-router. Tokens are right, and all blocks are free afterwards.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from tests.e2e.harness import Engine, Prompt, ask, metrics, new_session, post, until
from tests.e2e.random_answers import give_all, random_requests
from tests.ports import reserve_port, reserve_ports
from tests.router.stubs import StubEngine, prefills, stub_engine
from tests.vllm.abused_cluster import FAILED, FINISHED, SOON_S, fresh
from tests.vllm.conftest import Trio
from tests.vllm.fleet import ROOT, Fleet, ready
from tests.vllm.vllm_asking import ONLY_THE_BEST, assert_free, stream

from kvferry.bench.router.contestants import Tools, missing_packages
from kvferry.bench.router.report import Router
from kvferry.types import Address

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK_TOKENS = 32
ABORTS = "kvferry:router_client_aborts_total"
VLLM_ROUTER = ROOT / ".venv-router" / "bin" / "vllm-router"
ROUTER_PYTHON = VLLM_ROUTER.with_name("python")


@dataclass(frozen=True)
class Routed:
    """P and D, and one of the routers in front of them."""

    name: str
    p: Engine
    d: Engine
    router: Engine

    def prompt(self, length: int, about: str, **changes: int) -> Prompt:
        """Return a prompt that differs for every router and purpose, so that D has nothing of it
        yet.
        """
        rng = random.Random(f"{self.name} {about}")
        return Prompt(tuple(rng.randrange(10, 500) for _ in range(length)), **changes)


@pytest.fixture(scope="module", params=["kvferry", "toy", "vllm-router"])
def routed(request: pytest.FixtureRequest, trio: Trio) -> Iterator[Routed]:
    start = {"kvferry": _start_kvferry, "toy": _start_toy, "vllm-router": _start_vllm_router}[
        request.param
    ]
    router = start(trio)
    ready(router)
    yield Routed(request.param, trio.p, trio.d, router)
    trio.fleet.stop(router)


def _start_kvferry(trio: Trio) -> Engine:
    return trio.fleet.kvferry_router([trio.p], [trio.d])


def _start_toy(trio: Trio) -> Engine:
    tools = Tools(ROUTER_PYTHON)
    if not ROUTER_PYTHON.exists() or missing_packages(Router.TOY, tools):
        pytest.skip(
            "what vLLM's toy proxy is made of is not installed here; make setup-vllm does it"
        )
    port = reserve_port()
    command = [
        str(tools.python),
        str(tools.toy_program),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    for role, engine in (("prefiller", trio.p), ("decoder", trio.d)):
        command += [
            f"--{role}-hosts",
            engine.address.host,
            f"--{role}-ports",
            str(engine.address.port),
        ]
    return trio.fleet.router("toy", command, port)


def _start_vllm_router(trio: Trio) -> Engine:
    return start_vllm_router(trio.fleet, trio.p, trio.d)


def start_vllm_router(fleet: Fleet, p: Engine, d: Engine) -> Engine:
    if not VLLM_ROUTER.exists():
        pytest.skip("vllm-router is not installed here; make setup-vllm does it")
    port, prometheus = reserve_ports(2)
    command = [
        str(VLLM_ROUTER),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-port",
        str(prometheus),
    ]
    command += [
        "--vllm-pd-disaggregation",
        "--kv-connector",
        "nixl",
        "--prefill",
        p.url,
        "--decode",
        d.url,
    ]
    return fleet.router(
        "vllm-router",
        [*command, "--policy", "round_robin", "--worker-startup-check-interval", "1"],
        port,
    )


async def assert_serves_random_requests(router: Engine, p: Engine, d: Engine, seed: int) -> None:
    """Check that 48 chats and completions, most of them streamed, get the answers of one engine,
    that D loads the KV of each, and that P holds no block for them afterwards.
    """
    asked = random_requests(48, seed, {})
    async with new_session() as session:
        before = await metrics(session, d)
        given = await give_all(router, asked)
        after = await metrics(session, d)
        loads = [after.get(name, 0) - before.get(name, 0) for name in (FINISHED, FAILED)]
        assert [answer.error for answer in given] == [""] * len(asked)
        # P without a router is one engine.
        for request, one, right in zip(asked, given, await give_all(p, asked), strict=True):
            assert one == right, request
        assert loads == [len(asked), 0]
        await assert_free(session, p, d, timeout_s=SOON_S)


async def moved_bytes(session: aiohttp.ClientSession, engine: Engine) -> float:
    return (await metrics(session, engine))["vllm:nixl_bytes_transferred_sum"]


BLOCK_BYTES = BLOCK_TOKENS * 4 * 2 * 2 * 64 * 4
"""4 layers, 2 heads, K and V, 64 floats each."""


@pytest.mark.parametrize("length", [1, 7, 31, 32, 33, 64, 65, 700])
def test_prompts_of_every_length_give_the_tokens_of_one_engine(routed: Routed, length: int) -> None:
    async def check() -> None:
        async with new_session() as session:
            prompt = routed.prompt(length, f"length {length}")
            before = await moved_bytes(session, routed.d)
            answer = await ask(session, routed.router, prompt)
            assert answer.is_ok, answer.body
            assert answer == await ask(session, routed.p, prompt)
            await assert_free(session, routed.p, routed.d, timeout_s=SOON_S)
            # The KV did move: D has not computed the prompt.
            assert (
                await moved_bytes(session, routed.d) - before
                == -(-length // BLOCK_TOKENS) * BLOCK_BYTES
            )

    asyncio.run(check())


def test_what_the_decode_side_has_already_is_not_fetched_again(routed: Routed) -> None:
    """A full hit, and prompts that extend a known one: within the block, at its end, and by several
    blocks.
    """

    async def check() -> None:
        async with new_session() as session:
            whole = routed.prompt(200, "hits")
            known = Prompt(whole.token_ids[:64])
            assert await ask(session, routed.router, known) == await ask(session, routed.p, known)
            before = await moved_bytes(session, routed.d)
            assert await ask(session, routed.router, known) == await ask(session, routed.p, known)
            for length in (65, 70, 96, 200):
                longer = Prompt(whole.token_ids[:length])
                assert await ask(session, routed.router, longer) == await ask(
                    session, routed.p, longer
                ), length
            await assert_free(session, routed.p, routed.d, timeout_s=SOON_S)
            fetched = (await moved_bytes(session, routed.d) - before) / BLOCK_BYTES
            # D fetches only what it lacks: one block each for 64 (no engine takes a whole prompt
            # from its cache), 65, 70 and 96 tokens, and four for 200.
            assert fetched == 8

    asyncio.run(check())


def test_streams_and_chats_give_the_answers_of_one_engine(routed: Routed) -> None:
    async def check() -> None:
        async with new_session() as session:
            prompt = routed.prompt(150, "stream", max_tokens=24)
            tokens = await stream(
                session, routed.router, prompt, stream_options={"include_usage": True}, min_tokens=2
            )
            assert (tokens,) == (await ask(session, routed.p, prompt)).token_ids
            text = (
                f"Where does the transfer worker of {routed.name} go, and what does it carry? " * 8
            )
            chat = {
                "model": "tiny",
                "messages": [{"role": "user", "content": text}],
                "max_completion_tokens": 12,
            }
            chat |= {"temperature": 0, "ignore_eos": True}
            through, direct = [
                await post(session, engine, chat, "/v1/chat/completions")
                for engine in (routed.router, routed.p)
            ]
            assert through.body["choices"] == direct.body["choices"]
            assert through.body["choices"][0]["message"]["content"]
            await assert_free(session, routed.p, routed.d, timeout_s=SOON_S)

    asyncio.run(check())


def test_random_requests_get_the_answers_of_one_engine(routed: Routed) -> None:
    seed = random.Random(routed.name).randrange(1000)
    asyncio.run(assert_serves_random_requests(routed.router, routed.p, routed.d, seed))


def test_four_choices_of_one_request_read_one_lease_and_leave_none(routed: Routed) -> None:
    async def check() -> None:
        async with new_session() as session:
            prompt = routed.prompt(200, "choices")
            pulls = "kvferry:finished_loads_total"
            before = (await metrics(session, routed.d))[pulls]
            answer = await ask(session, routed.router, prompt, n=4, **ONLY_THE_BEST)
            assert answer.is_ok, answer.body
            assert answer.token_ids == (await ask(session, routed.p, prompt)).token_ids * 4
            warm = await ask(
                session, routed.router, routed.prompt(210, "warm choices"), n=4, temperature=1.0
            )
            assert [len(choice) for choice in warm.token_ids] == [16] * 4
            await assert_free(session, routed.p, routed.d, timeout_s=SOON_S)
            assert (await metrics(session, routed.d))[pulls] - before == 2

    asyncio.run(check())


# -- our router alone --


async def stream_choices(
    session: aiohttp.ClientSession, engine: Engine, body: dict[str, Any]
) -> tuple[dict[int, tuple[list[int], str]], dict[str, Any]]:
    """Stream several choices; return tokens and text of each by index, and the usage."""
    tokens: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    async with session.post(f"{engine.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        *events, end, rest = (await response.read()).split(b"\n\n")
    assert (end, rest) == (b"data: [DONE]", b"")
    *chunks, last = (json.loads(event.removeprefix(b"data: ")) for event in events)
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"] or ())
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    return {index: (tokens[index], texts[index]) for index in tokens}, last["usage"]


def test_several_prompts_in_one_request_get_the_answer_of_one_engine(trio: Trio) -> None:
    async def check() -> None:
        async with new_session() as session:
            rng = random.Random("several prompts")
            token_ids = [[rng.randrange(10, 500) for _ in range(size)] for size in (5, 64, 150)]
            texts = ["Where does the transfer worker go?", "What does it carry? " * 20]
            for prompts in (token_ids, texts):
                body: dict[str, Any] = {"model": "tiny", "prompt": prompts, "n": 2, "max_tokens": 8}
                body |= {"return_token_ids": True, "ignore_eos": True, **ONLY_THE_BEST}
                moved = await moved_bytes(session, trio.d)
                through, direct = [
                    await post(session, engine, body) for engine in (trio.router, trio.p)
                ]
                assert through.is_ok, through.body
                assert through.body["choices"] == direct.body["choices"]
                assert through.body["usage"] == direct.body["usage"]
                assert await moved_bytes(session, trio.d) > moved
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                streamed = await stream_choices(session, trio.router, body)
                assert streamed == await stream_choices(session, trio.p, body)
            await assert_free(session, trio.p, trio.d, timeout_s=SOON_S)

    asyncio.run(check())


def test_a_client_that_leaves_before_p_has_answered_frees_p_although_p_s_answer_is_lost(
    trio: Trio,
) -> None:
    """P's front-end is stopped until P's engine has computed the prompt and the client has left.
    The front-end then drops the answer, and nobody learns the ticket.
    """
    front_end, *engine = trio.p.family()

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in engine)

    async def check() -> None:
        async with new_session() as session:
            aborts = (await metrics(session, trio.router))[ABORTS]
            idle = cpu_s()
            asking = asyncio.create_task(ask(session, trio.router, fresh(1800)))
            await until("P's engine computes", lambda: _is(cpu_s() > idle + 0.1))
            front_end.suspend()
            try:
                await until("P's engine has computed the prompt", lambda: _stands_still(cpu_s))
                asking.cancel()
                await asyncio.wait({asking})

                async def has_noticed() -> bool:
                    return (await metrics(session, trio.router))[ABORTS] > aborts

                await until("the router has noticed", has_noticed)
            finally:
                front_end.resume()
            await assert_free(session, trio.p, trio.d, timeout_s=SOON_S)

    asyncio.run(check())


async def _is(condition: bool) -> bool:
    return condition


async def _stands_still(cpu_s: Callable[[], float]) -> bool:
    before = cpu_s()
    await asyncio.sleep(1)
    return cpu_s() < before + 0.1


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_is_told_why_a_transfer_failed(trio: Trio, is_streamed: bool) -> None:
    """P is a stub whose tickets D refuses; vLLM itself answers `500 Internal server error`."""

    async def check() -> None:
        async with new_session() as session, stub_engine(StubEngine(prefills)) as stub:
            p = Engine(trio.p.process, Address("127.0.0.1", stub.port))
            router = trio.fleet.kvferry_router([p], [trio.d])
            await asyncio.to_thread(ready, router)
            async with session.post(
                f"{router.url}/v1/completions",
                json={**Prompt((11, 12, 13)).body(), "stream": is_streamed},
            ) as response:
                status, text = response.status, (await response.json())["error"]["message"]
            trio.fleet.stop(router)
            reason = "the ticket was not signed with this cluster's secret"
            assert (status, reason in text) == (502, True), text
            await assert_free(session, trio.d, timeout_s=SOON_S)

    asyncio.run(check())
