"""Tests real vLLM on a GPU with each kind of attention, cache and model: D's tokens from P's KV are
P's own.

In half precision, a prompt computed at once and the same prompt computed in parts may differ by
rounding. So prompts here have whole blocks and one token more: P answers from its own prefix cache
and D from what P handed over, both compute one token, and every bit must be equal.
"""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from tests.e2e.harness import (
    PREFILL_PARAMS,
    Engine,
    Prompt,
    ask,
    metrics,
    new_session,
)
from tests.gpu.vllm.gpu_fleet import HALF, GpuFleet, on_gpu
from tests.vllm.adapters import write_adapter
from tests.vllm.fleet import ready
from tests.vllm.vllm_asking import assert_free

from kvferry.engine.make_model.weights import (
    FAMILIES,
    SIZES,
    LatentSize,
    make_config,
    make_tensors,
)
from kvferry.engine.make_model.writer import make_model

pytestmark = on_gpu

BLOCK, NUM_PROMPTS = 32, 20
ADAPTER = "adapter"
LOG_LINES = 200
DEEPSEEK = LatentSize(
    q_lora_rank=96, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
"""The dimensions that vLLM's kernels for latent attention are made for."""
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
"""Without compilation, which takes minutes."""


@dataclass(frozen=True)
class Kind:
    flags: tuple[str, ...]
    family: str = "qwen3"
    model: str = "tiny"
    """The name of the model, or of an adapter, in requests."""


KINDS = {
    "FlashAttention": Kind(HALF),
    "Triton": Kind(("--dtype", "bfloat16")),
    "CUDA graphs": Kind((*HALF, "--no-enforce-eager", "--compilation-config", json.dumps(GRAPHS))),
    "fp8 cache": Kind((*HALF, "--kv-cache-dtype", "fp8")),
    "latent attention": Kind(("--dtype", "bfloat16", "--attention-backend", "TRITON_MLA"), "mla"),
    "sliding windows": Kind((), "window"),
    "LoRA": Kind((*HALF, "--enable-lora", "--max-lora-rank", "8"), model=ADAPTER),
}


@dataclass(frozen=True)
class Pair:
    p: Engine
    d: Engine


def write_model(directory: Path, family: str) -> None:
    make_model(directory, family=family)
    if family == "mla":
        size = replace(SIZES["tiny"], latent=DEEPSEEK)
        config = make_config(FAMILIES[family], size)
        (directory / "config.json").write_text(json.dumps(config))
        tensors = dict(make_tensors(FAMILIES[family], size, seed=0))
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    directory = tmp_path_factory.mktemp("kinds")
    adapter = write_adapter(directory / ADAPTER)
    with ExitStack() as closing:
        fleets: dict[str, GpuFleet] = {}
        for family in sorted({kind.family for kind in KINDS.values()}):
            write_model(directory / family, family)
            fleets[family] = closing.enter_context(
                GpuFleet(directory / f"{family} fleet", directory / family)
            )
        made = {}
        for name, kind in KINDS.items():
            flags = kind.flags
            if kind.model == ADAPTER:
                flags += ("--lora-modules", f"{ADAPTER}={adapter}")
            fleet = fleets[kind.family]
            made[name] = Pair(fleet.start(f"P, {name}", *flags), fleet.start(f"D, {name}", *flags))
        yield made


def test_cuda_graphs_are_on(pairs: dict[str, Pair]) -> None:
    pair = pairs["CUDA graphs"]
    ready(pair.p, pair.d)
    for engine in (pair.p, pair.d):
        log = engine.process.tail(LOG_LINES)
        assert any("Graph capturing finished" in line for line in log), log


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_that_p_gives_from_its_own_cache(
    pairs: dict[str, Pair], name: str
) -> None:
    pair, kind = pairs[name], KINDS[name]
    ready(pair.p, pair.d)
    rng = random.Random(70)
    lengths = [rng.randrange(1, 40) * BLOCK + 1 for _ in range(NUM_PROMPTS)]
    prompts = [Prompt(tuple(rng.randrange(10, 500) for _ in range(n))) for n in lengths]

    async def check() -> None:
        async with new_session(60) as session:
            before = await metrics(session, pair.p)
            for prompt in prompts:
                computed = await ask(
                    session,
                    pair.p,
                    prompt,
                    model=kind.model,
                    max_tokens=1,
                    kv_transfer_params=PREFILL_PARAMS,
                )
                assert computed.is_ok, computed.body
                params = computed.body["kv_transfer_params"]
                moved = await ask(
                    session, pair.d, prompt, model=kind.model, kv_transfer_params=params
                )
                assert moved.is_ok, moved.body
                assert moved == await ask(session, pair.p, prompt, model=kind.model)
            # The one answered from KV that P handed over, the other from its own cache.
            loads = (await metrics(session, pair.d))["kvferry:finished_loads_total"]
            assert loads == NUM_PROMPTS
            hits = "vllm:prefix_cache_hits_total"
            hit = (await metrics(session, pair.p))[hits] - before[hits]
            assert hit == sum(length - 1 for length in lengths)
            await assert_free(session, pair.p, pair.d)

    asyncio.run(check())


def test_the_tokens_depend_on_every_adapter_and_prompt(pairs: dict[str, Pair]) -> None:
    """The negative control: without the adapter, or with one other token, the tokens differ."""
    d, tokens = pairs["LoRA"].d, tuple(range(100, 300))
    ready(d)

    async def check() -> None:
        async with new_session(60) as session:
            answers = [
                await ask(session, d, Prompt(tokens), model=ADAPTER),
                await ask(session, d, Prompt(tokens)),
                await ask(session, d, Prompt((99, *tokens[1:])), model=ADAPTER),
            ]
            assert all(answer.is_ok for answer in answers)
            assert len({answer.token_ids for answer in answers}) == len(answers)

    asyncio.run(check())
