"""Tests that P or D, as real processes on one GPU, survives when the other is killed or stopped
during transfers: it keeps serving, no token is wrong, and no block and no device memory is lost.

D reports each transfer late, so that several transfers are always running.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from tests.e2e.handovers import FINISHED
from tests.e2e.harness import (
    Answer,
    Engine,
    Prompt,
    Starting,
    ask,
    ask_all,
    assert_quiescent,
    metrics,
    new_session,
    until,
)
from tests.gpu.gpu_cluster import DTYPES, TRANSPORTS, GpuCluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

SHORT: dict[str, Any] = {
    "kv_lease_duration": 2,
    "handshake_timeout": 2,
    "confirm_timeout": 2,
    "read_timeout": 5,
    "receive_timeout": 10,
}
PROMPTS = [
    Prompt(
        tuple(10 + (7 * n * n + 13 * n * i + i * i) % 480 for i in range(80 + 97 * n)), max_tokens=8
    )
    for n in range(12)
]
CLIENTS = 8
ENOUGH = 16
"""The number of transfers that prove that the two engines work together."""
STOPPED_S = 4.0
"""Longer than a lease and longer than any timeout for an answer."""
RESTART_S = 90.0
CACHE = ("--kv-cache-memory-bytes", "1G")
"""Large enough that used device memory shows a dead engine's cache that a survivor keeps open."""
SLACK_BYTES = 512 * 2**20

Hurt = Callable[[aiohttp.ClientSession], Awaitable[None]]


@dataclass
class Stage:
    """P, D and the router in front of them. A test may replace P or D by a new incarnation at the
    same address.
    """

    cluster: GpuCluster
    transport: str
    plain: Engine
    p: Engine = field(init=False)
    d: Engine = field(init=False)
    router: Engine = field(init=False)
    right: list[Answer] = field(init=False)
    salts: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        starting = self.start_p(), self.start_d()
        self.p, self.d = (process.ready() for process in starting)
        self.router = self.cluster.proxy([self.p], [self.d]).ready()
        self.right = asyncio.run(ask_all(self.plain, PROMPTS))

    def start_p(self, port: int = 0) -> Starting:
        return self.cluster.serve_on_gpu(
            "prefill", self.transport, "pull", *CACHE, port=port, engine_id="p", **SHORT
        )

    def start_d(self, port: int = 0) -> Starting:
        late = "delay:polls=1000"
        return self.cluster.serve_on_gpu(
            "decode", self.transport, "pull", *CACHE, faults=late, port=port, engine_id="d", **SHORT
        )

    async def restart(self, starting: Starting) -> Engine:
        """Wait until the engine is ready without blocking the running clients."""
        return await asyncio.to_thread(starting.ready)

    async def endure(self, hurt: Hurt) -> None:
        """Run clients before, during and after the fault. Then check that all blocks of P and D are
        free, and that the device memory in use has not grown.
        """
        outcomes: list[tuple[int, Answer]] = []
        stop = asyncio.Event()
        async with new_session() as session:

            async def client(numbers: Iterator[int]) -> None:
                while not stop.is_set():
                    number = next(numbers)
                    # Each request has its own cache salt: no prefix cache hits, so all KV must be
                    # transferred.
                    answer = await ask(
                        session,
                        self.router,
                        PROMPTS[number % len(PROMPTS)],
                        cache_salt=f"{self.transport} {number}",
                    )
                    outcomes.append((number, answer))
                    if not answer.is_ok:
                        await asyncio.sleep(0.2)

            clients = [asyncio.create_task(client(self.salts)) for _ in range(CLIENTS)]
            try:
                await self._until_moved(session)
                before = used_bytes()
                await hurt(session)
                await self._until_moved(session)
            finally:
                stop.set()
                ended = await asyncio.gather(*clients, return_exceptions=True)
            assert not any(isinstance(each, BaseException) for each in ended), ended
            for number, answer in outcomes:
                assert (
                    answer == self.right[number % len(PROMPTS)]
                    if answer.is_ok
                    else answer.status in (502, 503, 504)
                ), answer
            await assert_quiescent(session, self.p, self.d)
            if (
                self.transport == "cuda_ipc"
            ):  # UCX keeps a dead process's memory open until its own exit (docs/faults.md)
                await until(
                    "the memory of the dead is given back",
                    partial(has_no_more, before + SLACK_BYTES),
                )

    async def assert_serves(self, session: aiohttp.ClientSession, survivor: Engine) -> None:
        """Check the survivor's answers to requests that go to it directly."""
        for number in range(4):
            answer = await ask(
                session, survivor, PROMPTS[number], cache_salt=f"alone {next(self.salts)}"
            )
            assert answer == self.right[number]

    async def _until_moved(self, session: aiohttp.ClientSession) -> None:
        """Wait until D has loaded `ENOUGH` more prompts and this transport has moved bytes."""
        before = await metrics(session, self.d)

        async def has_moved() -> bool:
            now = await metrics(session, self.d)
            name = f"kvferry:transfer_bytes_total/{self.transport}"
            return now.get(FINISHED, 0) >= before.get(FINISHED, 0) + ENOUGH and now.get(
                name, 0
            ) > before.get(name, 0)

        await until("KV comes over", has_moved, RESTART_S)


def used_bytes() -> int:
    """Return the memory in use on the whole device."""
    free, total = torch.cuda.mem_get_info()
    return total - free


async def has_no_more(limit_bytes: int) -> bool:
    return used_bytes() <= limit_bytes


def kill(engine: Engine) -> None:
    """Send SIGKILL to every process of the engine; the process that computes cannot clean up."""
    engine.kill(is_stopped=True)


@pytest.fixture(scope="module")
def plains(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[dict[str, Starting]]:
    with GpuCluster(tmp_path_factory.mktemp("plain"), model) as cluster:
        yield {transport: cluster.plain_on_gpu(DTYPES[transport]) for transport in TRANSPORTS}


@pytest.fixture(scope="module", params=TRANSPORTS)
def stage(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    plains: dict[str, Starting],
) -> Iterator[Stage]:
    with GpuCluster(tmp_path_factory.mktemp("stage"), model) as cluster:
        yield Stage(cluster, request.param, plains[request.param].ready())


def test_d_survives_a_killed_p_and_uses_its_next_life(stage: Stage) -> None:
    async def kill_it(session: aiohttp.ClientSession) -> None:
        port = stage.p.address.port
        await asyncio.to_thread(kill, stage.p)
        stage.cluster.dismiss(stage.p.process)
        starting = stage.start_p(port)
        await stage.assert_serves(session, stage.d)
        stage.p = await stage.restart(starting)

    asyncio.run(stage.endure(kill_it))


def test_p_survives_a_killed_d_and_serves_its_next_life(stage: Stage) -> None:
    async def kill_it(session: aiohttp.ClientSession) -> None:
        port = stage.d.address.port
        await asyncio.to_thread(kill, stage.d)
        stage.cluster.dismiss(stage.d.process)
        starting = stage.start_d(port)
        await stage.assert_serves(session, stage.p)
        stage.d = await stage.restart(starting)

    asyncio.run(stage.endure(kill_it))


def test_d_survives_a_p_that_is_stopped_and_uses_it_when_it_goes_on(stage: Stage) -> None:
    async def stop(session: aiohttp.ClientSession) -> None:
        stage.p.pause()
        try:
            await stage.assert_serves(session, stage.d)
            await asyncio.sleep(STOPPED_S)
            await stage.assert_serves(session, stage.d)
        finally:
            stage.p.resume()

    asyncio.run(stage.endure(stop))


def test_p_survives_a_d_that_is_stopped_and_serves_it_when_it_goes_on(stage: Stage) -> None:
    async def stop(session: aiohttp.ClientSession) -> None:
        stage.d.pause()
        try:
            await stage.assert_serves(session, stage.p)
            await asyncio.sleep(STOPPED_S)
            await stage.assert_serves(session, stage.p)
        finally:
            stage.d.resume()

    asyncio.run(stage.endure(stop))
