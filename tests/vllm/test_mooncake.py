"""Tests MooncakeConnector in real vLLM: right tokens, also after the death of each process."""

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.e2e.harness import Engine, Prompt, ask_all, metrics, new_session
from tests.ports import reserve_port
from tests.transports.mooncake_agents import AGENT
from tests.vllm.conftest import Trio
from tests.vllm.documented import documented
from tests.vllm.fleet import PYTHON, Fleet, ready
from tests.vllm.killed import assert_right_or_error, kill_p_while_d_reads, kill_while_kv_moves
from tests.vllm.right import BYTES_PER_TOKEN, PROMPTS, Right
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


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
            # On a busy machine a read may miss its deadline; D then computes the prompt.
            assert seen["kvferry:transfer_bytes_total/mooncake"] >= 0.9 * moved
            loads = [seen[f"kvferry:{kind}_loads_total"] for kind in ("finished", "failed")]
            assert sum(loads) == len(PROMPTS)
            assert loads[0] >= 0.9 * len(PROMPTS), trio.d.process.tail(50)
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
    psutil.wait_procs(agents, 60)

    async def check() -> None:
        async with new_session(60) as session:
            await until_kv_moves(session, trio, random_prompts(40, seed=77))
            assert await ask_all(trio.router, PROMPTS[:8], timeout_s=120) == right.vllm[:8]
            await assert_free(session, trio.p, trio.d)

    asyncio.run(check())


@pytest.mark.exhaustive
def test_one_corrupted_block_in_transit_changes_the_tokens(right: Right, trio: Trio) -> None:
    """The negative control of the comparison above: it must see a wrong byte."""
    (serve,) = documented("Mooncake")
    corrupt = {"KVFERRY_FAULTS": "corrupt:every=1"}
    d = trio.fleet.vllm("corrupted decode", transfer=serve.transfer, cores="1", environment=corrupt)
    router = trio.fleet.kvferry_router([trio.p], [d])
    ready(d, router)
    chosen = [n for n, prompt in enumerate(PROMPTS) if len(prompt.token_ids) < 200][:8]
    answers = asyncio.run(ask_all(router, [PROMPTS[n] for n in chosen], timeout_s=120))
    assert all(answer.is_ok for answer in answers)
    assert all(a != right.vllm[n] for a, n in zip(answers, chosen, strict=True))
    trio.fleet.stop(router)
    trio.fleet.stop(d)


def test_an_engine_that_is_killed_costs_the_other_nothing(right: Right, trio: Trio) -> None:
    """The last test of this file. P is killed while D reads from it; its successor has the same
    address. Then D is killed while it reads from that successor.
    """
    first, second = random_prompts(4, seed=74), random_prompts(12, seed=75)

    async def check() -> None:
        async with new_session(120) as session:
            expected = await ask_all(trio.p, [*first, *second], timeout_s=120)
            answers = await kill_p_while_d_reads(session, trio.p, trio.d, first)
            assert_right_or_error(answers, expected[: len(first)])
            await assert_free(session, trio.d)
            assert await ask_all(trio.d, PROMPTS[:8], timeout_s=120) == right.vllm[:8]

            p = restart_p(trio)
            await until_kv_moves(session, trio, random_prompts(40, seed=76))
            answers = await kill_while_kv_moves(session, trio.d, trio.d, trio.router, second)
            assert_right_or_error(answers, expected[len(first) :])
            assert not all(answer.is_ok for answer in answers), "D was killed too late"
            await assert_free(session, p)
            assert await ask_all(p, PROMPTS[:8], timeout_s=120) == right.vllm[:8]

    asyncio.run(check())


async def until_kv_moves(
    session: aiohttp.ClientSession, trio: Trio, prompts: Sequence[Prompt]
) -> None:
    """Send prompts that D does not have until it has loaded one. D computes the others meanwhile,
    which takes long on a busy machine.
    """
    before = (await metrics(session, trio.d))["kvferry:finished_loads_total"]
    for prompt in prompts:
        await ask_all(trio.router, [prompt], timeout_s=120)
        if (await metrics(session, trio.d))["kvferry:finished_loads_total"] > before:
            return
    raise AssertionError(f"D loaded none of {len(prompts)} prompts: {trio.d.process.tail(50)}")


def restart_p(trio: Trio) -> Engine:
    """Start P again at its address, and wait until the router has found it."""
    (serve,) = documented("Mooncake")
    trio.fleet.stop(trio.p)
    side_channel = reserve_port()
    p = trio.fleet.vllm(
        "second prefill",
        transfer=serve.transfer,
        extra={"kv_lease_duration": 3},
        ports=(trio.p.address.port, side_channel),
    )
    ready(p, trio.router)
    return p
