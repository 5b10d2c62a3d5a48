"""Tests MooncakeConnector in real vLLM: right tokens, also after the death of each process."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.harness import ask_all, metrics, new_session, until
from tests.transports.mooncake_agents import AGENT
from tests.vllm.conftest import Trio
from tests.vllm.documented import documented
from tests.vllm.fleet import PYTHON, Fleet, ready
from tests.vllm.right import BYTES_PER_TOKEN, PROMPTS, Right
from tests.vllm.vllm_asking import assert_free

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trio]:
    if subprocess.run([PYTHON, "-c", "import mooncake.engine"], check=False).returncode:
        pytest.skip("vLLM's environment has no Mooncake; make setup-vllm installs it")
    (serve,) = documented("Mooncake")
    with Fleet(tmp_path_factory.mktemp("mooncake"), model) as fleet:
        p, d = (
            fleet.vllm(name, transfer=serve.transfer, policy="recompute", cores=core)
            for name, core in (("prefill", "0"), ("decode", "1"))
        )
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Trio(fleet, p, d, router)


def test_tokens_equal_a_plain_vllms(right: Right, trio: Trio) -> None:
    async def check() -> None:
        assert await ask_all(trio.router, PROMPTS, concurrency=8, timeout_s=240) == right.vllm
        async with new_session(60) as session:
            seen = await metrics(session, trio.d)
            moved = sum(len(prompt.token_ids) for prompt in PROMPTS) * BYTES_PER_TOKEN
            assert seen["kvferry:transfer_bytes_total/mooncake"] >= moved
            assert seen["kvferry:finished_loads_total"] == len(PROMPTS)
            assert seen["kvferry:failed_loads_total"] == 0
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


def test_agents_that_are_killed_cost_no_token(right: Right, trio: Trio) -> None:
    agents = [
        member
        for engine in (trio.p, trio.d)
        for member in engine.family()
        if AGENT in member.cmdline()
    ]
    assert len(agents) == 2
    for agent in agents:
        agent.kill()
    psutil.wait_procs(agents, 20)

    async def check() -> None:
        async with new_session(60) as session:
            before = (await metrics(session, trio.d))["kvferry:finished_loads_total"]

            async def moves_again() -> bool:
                assert await ask_all(trio.router, PROMPTS[:8], timeout_s=120) == right.vllm[:8]
                return (await metrics(session, trio.d))["kvferry:finished_loads_total"] > before

            await until("KV moves again", moves_again, 60)
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


def test_an_engine_that_is_killed_costs_the_other_nothing(right: Right, trio: Trio) -> None:
    """The last test of this file: P is killed while D asks it for KV."""

    async def check() -> None:
        asking = asyncio.ensure_future(
            ask_all(trio.router, PROMPTS[:24], concurrency=8, timeout_s=240)
        )
        async with new_session(60) as session:
            before = (await metrics(session, trio.d))["kvferry:finished_loads_total"]

            async def is_moving() -> bool:
                return (await metrics(session, trio.d))["kvferry:finished_loads_total"] > before

            await until("KV moves", is_moving)
            trio.p.kill(is_stopped=True)
            for answer, expected in zip(await asking, right.vllm, strict=False):
                assert answer.status != 200 or answer == expected
            assert await ask_all(trio.d, PROMPTS[:8], timeout_s=120) == right.vllm[:8]
            await assert_free(session, trio.d)

    asyncio.run(check())
