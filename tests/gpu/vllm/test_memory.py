"""Tests that kvferry leaves a GPU's memory to vLLM: servers that size their cache by themselves
start with nearly all memory, or side by side, and serve long prompts.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Engine, Prompt, ask, metrics, new_session, prefill
from tests.gpu.vllm.gpu_fleet import HALF, GpuFleet, on_gpu
from tests.vllm.fleet import ready

from kvferry.bench.vllm.gpu_handover import gpu_model_directory

pytestmark = on_gpu

LONG = Prompt(tuple(random.Random(72).choices(range(10, 500), k=30_000)), max_tokens=4)
REQUEST_S = 60.0


class LargeFleet(GpuFleet):
    """Its servers profile the GPU's memory."""

    gpu_flags = ()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[GpuFleet]:
    with gpu_model_directory() as model, LargeFleet(tmp_path / "fleet", model) as fleet:
        yield fleet


def start(fleet: GpuFleet, name: str, share: float) -> Engine:
    """Start a server, and wait for it."""
    flags = ("--load-format", "dummy", "--max-model-len", "32768")
    engine = fleet.vllm(name, *HALF, *flags, "--gpu-memory-utilization", str(share))
    ready(engine)
    return engine


def test_a_server_with_nearly_all_memory_serves_a_long_prompt(fleet: GpuFleet) -> None:
    engine = start(fleet, "alone", 0.95)

    async def check() -> None:
        async with new_session(REQUEST_S) as session:
            answer = await ask(session, engine, LONG)
            assert answer.is_ok, answer.body

    asyncio.run(check())


def test_two_servers_that_share_a_gpu_hand_over_a_long_prompt(fleet: GpuFleet) -> None:
    # One after the other: vLLM counts memory that another server takes meanwhile as its own.
    p = start(fleet, "P", 0.45)
    d = start(fleet, "D", 0.45)

    async def check() -> None:
        async with new_session(REQUEST_S) as session:
            params = await prefill(session, p, LONG)
            answer = await ask(session, d, LONG, kv_transfer_params=params)
            assert answer.is_ok, answer.body
            assert (await metrics(session, d))["kvferry:finished_loads_total"] == 1

    asyncio.run(check())
