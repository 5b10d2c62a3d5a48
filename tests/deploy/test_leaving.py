"""How an engine leaves a fleet: it says so to its routers at the first signal, and `kvferry drain`
waits for the work of an engine that does not drain by itself.
"""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.harness import Cluster, Engine, Prompt, ask, new_session, prefill, until

from kvferry.cli.drain import IdleTime, count_work
from kvferry.engine.make_model.writer import make_model
from kvferry.router.fleet.instance_metrics import read_metrics

PATIENT = {"kv_lease_duration": 600}
PROMPT = Prompt(tuple(range(10, 130)))
ADMIN_KEY = "operator"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    make_model(tmp_path / "tiny")
    with Cluster(tmp_path, tmp_path / "tiny") as made:
        yield made


def test_an_engine_is_idle_once_it_has_had_no_work_for_long_enough() -> None:
    idle = IdleTime(idle_s=10)
    assert not idle.note(2, now=0)
    assert not idle.note(0, now=5)
    assert not idle.note(1, now=14), "work has come back, so the time begins again"
    assert not idle.note(0, now=15)
    assert not idle.note(0, now=24)
    assert idle.note(0, now=25)


def test_requests_and_blocks_for_peers_are_work_and_retained_turns_are_not() -> None:
    page = (
        b'vllm:num_requests_running{model_name="m"} 1\nvllm:num_requests_waiting 2\n'
        b"kvferry:num_held_blocks 4\nkvferry:num_retained_blocks 8\n"
    )
    assert count_work(read_metrics(page)) == 7
    assert count_work(read_metrics(b"other:metric 1\n")) is None


def drain(engine: Engine, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "kvferry", "drain", "--url", engine.url, "--idle", "0"]
    return subprocess.run([*command, "--timeout", f"{timeout_s:g}"], capture_output=True, text=True)


@pytest.mark.slow
def test_drain_waits_for_blocks_that_a_peer_may_still_read(cluster: Cluster) -> None:
    starting = [cluster.serve(name, extra=PATIENT) for name in ("prefill", "decode")]
    p, d = (process.ready() for process in starting)

    async def check() -> None:
        async with new_session() as session:
            params = await prefill(session, p, PROMPT)
            too_early = await asyncio.to_thread(drain, p, 0.1)
            assert (too_early.returncode, "still has work" in too_early.stderr) == (1, True)
            waiting = asyncio.create_task(asyncio.to_thread(drain, p, 60))
            assert (await ask(session, d, PROMPT, kv_transfer_params=params)).is_ok
            assert (await waiting).returncode == 0
            p.kill()
            gone = await asyncio.to_thread(drain, p, 60)
            assert (gone.returncode, "nothing to wait for" in gone.stderr) == (0, True)

    asyncio.run(check())


@pytest.mark.slow
def test_an_engine_that_drains_tells_its_routers_at_once(cluster: Cluster, tmp_path: Path) -> None:
    """The engine holds a lease, so it still runs when the router shows that it drains."""
    (tmp_path / "router.toml").write_text("[health]\nprobe_interval_s = 0\n")
    (tmp_path / "admin").write_text(ADMIN_KEY)
    (tmp_path / "admin").chmod(0o600)
    flags = ("--config", str(tmp_path / "router.toml"), "--admin-key-file", str(tmp_path / "admin"))
    router = cluster.proxy([], [], *flags).ready()
    p = cluster.serve(
        "prefill",
        *("--router", router.url, "--router-role", "prefill", "--drain-timeout", "60"),
        extra=PATIENT,
    ).ready()

    async def state(session: aiohttp.ClientSession) -> str:
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with session.get(f"{router.url}/admin/instances", headers=key) as response:
            members = (await response.json())["instances"]
            return str(members[0]["state"]) if members else ""

    async def is_member(session: aiohttp.ClientSession) -> bool:
        return bool(await state(session))

    async def is_draining(session: aiohttp.ClientSession) -> bool:
        return await state(session) == "draining"

    async def check() -> None:
        async with new_session() as session:
            await until("P has registered", lambda: is_member(session))
            await prefill(session, p, PROMPT)
            p.process.terminate()
            await until("the router knows", lambda: is_draining(session), timeout_s=60)
            async with session.get(f"{p.url}/health") as response:
                assert (await response.json())["leases"] == 1, "P has ended before the check"

    asyncio.run(check())
