"""Tests P2pNcclConnector in real vLLM, over gloo and as documented: servers that register
themselves with kvferry's router give the tokens of a plain vLLM, also while strangers send noise to
their ports, and after kill -9 of each side.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import aiohttp
import psutil
import pytest
from tests.e2e.forgeries import knock
from tests.e2e.harness import Engine, ask, ask_all, metrics, new_session, until
from tests.ports import reserve_port, reserve_ports
from tests.vllm.documented import Documented, documented
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready
from tests.vllm.killed import assert_right_or_error, kill_p_while_d_reads, kill_while_kv_moves
from tests.vllm.right import PROMPTS, Right
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FINISHED, FAILED = "kvferry:finished_loads_total", "kvferry:failed_loads_total"
_seeds = count(1000)
MOVED_IN_GROUPS = "kvferry:transfer_bytes_total/dist"
SHORT = {"kv_lease_duration": 3, "handshake_timeout": 2, "read_timeout": 5, "receive_timeout": 10}


@dataclass(frozen=True)
class Registered:
    """P and D as documented, and the router with which they have registered."""

    backend: dict[str, str]
    fleet: Fleet
    p: Engine
    d: Engine
    router: Engine


def start(
    fleet: Fleet,
    name: str,
    router: Engine,
    command: Documented,
    cores: str,
    backend: dict[str, str],
) -> Engine:
    """Start a server as documented, with the ports and the backend of this test."""
    http, side_channel = reserve_ports(2)
    ports = {"proxy_port": str(router.address.port), "http_port": str(http)}
    return fleet.vllm(
        name,
        transfer=command.transfer,
        extra={**SHORT, **backend, **ports},
        cores=cores,
        ports=(http, side_channel),
    )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"backend": "gloo"}, id="gloo"),
        pytest.param({}, id="as documented", marks=pytest.mark.exhaustive),
    ],
)
def registered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path
) -> Iterator[Registered]:
    for_router, for_p, for_d = documented("In vLLM", "p2p-nccl.md")
    assert for_router.words[:2] == ("kvferry", "proxy")
    directory = tmp_path_factory.mktemp("p2p")
    (directory / "router.toml").write_text("")
    port = reserve_port()
    proxy = [sys.executable, "-m", "kvferry", "proxy", "--host", "127.0.0.1", "--port", str(port)]
    with Fleet(directory, model) as fleet:
        config = str(directory / "router.toml")
        router = fleet.router("router of p2p", [*proxy, "--config", config], port)
        p = start(fleet, "prefill", router, for_p, "0", request.param)
        d = start(fleet, "decode", router, for_d, "1", request.param)
        ready(p, d)
        yield Registered(request.param, fleet, p, d, router)


def test_tokens_equal_a_plain_vllms(right: Right, registered: Registered) -> None:
    async def check() -> None:
        async with new_session(120) as session:
            await until("both have registered", lambda: _is_answered(session, registered.router))
            before = await metrics(session, registered.d)
            answers = await ask_all(registered.router, PROMPTS, concurrency=8, timeout_s=240)
            assert answers == right.vllm
            after = await metrics(session, registered.d)
            assert after[FINISHED] - before[FINISHED] > len(PROMPTS) // 2
            assert after[FAILED] == before[FAILED]
            in_groups = (await metrics(session, registered.p)).get(MOVED_IN_GROUPS, 0)
            assert (in_groups > 0) == bool(registered.backend)
            await assert_free(session, registered.p, registered.d)

    asyncio.run(check())


def test_strangers_on_every_port_change_no_token(right: Right, registered: Registered) -> None:
    chosen = slice(0, 12)

    async def check() -> None:
        for port in _listening_ports(registered.p) | _listening_ports(registered.d):
            for held in knock("127.0.0.1", port, 60):
                held.close()
        answers = await ask_all(registered.router, PROMPTS[chosen], concurrency=4, timeout_s=120)
        assert_right_or_error(answers, right.vllm[chosen])
        async with new_session(120) as session:
            await until("KV moves again", lambda: _is_answered(session, registered.router))
            await assert_free(session, registered.p, registered.d)

    asyncio.run(check())


@pytest.mark.exhaustive
def test_one_corrupted_block_in_transit_changes_the_tokens(
    right: Right, registered: Registered
) -> None:
    """The negative control of the comparison above: it must see a wrong byte."""
    transfer = {**BY_MODULE_PATH, "kv_connector": "P2pNcclConnector"}
    pull = {"send_type": "GET", **registered.backend}
    p = registered.fleet.vllm("pulled prefill", transfer=transfer, extra=pull)
    d = registered.fleet.vllm(
        "corrupted decode",
        transfer=transfer,
        extra=pull,
        cores="1",
        environment={"KVFERRY_FAULTS": "corrupt:every=1"},
    )
    router = registered.fleet.kvferry_router([p], [d])
    ready(p, d, router)
    chosen = [n for n, prompt in enumerate(PROMPTS) if len(prompt.token_ids) < 200][:8]
    answers = asyncio.run(ask_all(router, [PROMPTS[n] for n in chosen], timeout_s=120))
    assert all(answer.is_ok for answer in answers)
    assert all(a != right.vllm[n] for a, n in zip(answers, chosen, strict=True))
    registered.fleet.stop(d)
    registered.fleet.stop(p)


def test_a_killed_side_leaves_the_other_one_serving(right: Right, registered: Registered) -> None:
    """The last test of this file. P is killed while D reads; its successor registers with the
    same router. Then D is killed while that successor pushes.
    """
    first, second = random_prompts(4, seed=72), random_prompts(12, seed=73)
    router, d = registered.router, registered.d

    async def check() -> None:
        async with new_session(120) as session:
            await until("both have registered", lambda: _is_answered(session, router))
            expected = await ask_all(registered.p, [*first, *second], timeout_s=120)
            answers = await kill_p_while_d_reads(session, registered.p, d, first)
            assert_right_or_error(answers, expected[: len(first)])
            await assert_free(session, d)
            assert await ask_all(d, PROMPTS[:8], timeout_s=120) == right.vllm[:8]

            for_p = documented("In vLLM", "p2p-nccl.md")[1]
            p = start(registered.fleet, "second prefill", router, for_p, "0", registered.backend)
            ready(p)
            await until("the second P pushes", lambda: _has_moved(session, registered))
            answers = await kill_while_kv_moves(session, d, d, router, second)
            assert_right_or_error(answers, expected[len(first) :])
            assert not all(answer.is_ok for answer in answers), "D was killed too late"
            await assert_free(session, p)
            assert await ask_all(p, PROMPTS[:8], timeout_s=120) == right.vllm[:8]

    asyncio.run(check())


async def _has_moved(session: aiohttp.ClientSession, registered: Registered) -> bool:
    """Send a prompt, and return whether its KV came from P."""
    before = (await metrics(session, registered.d))[FINISHED]
    (prompt,) = random_prompts(1, seed=next(_seeds))
    assert (await ask(session, registered.router, prompt)).is_ok
    return (await metrics(session, registered.d))[FINISHED] > before


async def _is_answered(session: aiohttp.ClientSession, router: Engine) -> bool:
    try:
        return (await ask(session, router, PROMPTS[0])).is_ok
    except aiohttp.ClientConnectionError:  # the router has not started yet
        return False


def _listening_ports(engine: Engine) -> set[int]:
    return {
        connection.laddr.port
        for process in engine.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
