"""Tests LoRA adapters in real vLLM: D uses P's KV only if both engines have loaded the same
adapter, whatever its name is and whatever its folder holds by now.
"""

import asyncio
from pathlib import Path

import pytest
from tests.e2e.harness import PREFILL_PARAMS, ask, metrics, new_session
from tests.vllm.adapters import write_adapter
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SAME, OTHER = "copied", ("scaled", "stabilised", "changed")


def write_adapters(folder: Path, *, is_decode: bool) -> list[str]:
    """Write the adapters of one engine and return the engine's flags."""
    write_adapter(folder / "copied", base=str(folder))
    write_adapter(folder / "scaled", alpha=64 if is_decode else 16)
    write_adapter(folder / "stabilised", use_rslora=is_decode)
    write_adapter(folder / "changed", seed=0 if is_decode else 5)
    flags = "--enable-lora --max-lora-rank 8 --max-cpu-loras 8 --lora-modules"
    return [*flags.split(), *(f"{name}={folder / name}" for name in (SAME, *OTHER))]


def test_tokens_under_adapters_that_are_the_same_and_that_only_look_so(
    tmp_path: Path, model: Path
) -> None:
    prompt = random_prompts(1, seed=3, shortest=200, longest=300)[0]
    flags = {side: write_adapters(tmp_path / side, is_decode=side == "d") for side in "pd"}
    with Fleet(tmp_path / "processes", model) as fleet:
        p, d = fleet.vllm("p", *flags["p"]), fleet.vllm("d", *flags["d"], cores="1")
        ready(p, d)
        # P has loaded these contents from its own folder; D serves what it has loaded before.
        write_adapter(tmp_path / "d" / "changed", seed=5)

        async def check(name: str, num_loads: int) -> None:
            async with new_session(60) as session:
                computed = await ask(
                    session, p, prompt, model=name, max_tokens=1, kv_transfer_params=PREFILL_PARAMS
                )
                params = computed.body["kv_transfer_params"]
                before = (await metrics(session, d))["kvferry:finished_loads_total"]
                answer = await ask(session, d, prompt, model=name, kv_transfer_params=params)
                # The other salt keeps both from using KV that they have already.
                d_alone = await ask(session, d, prompt, model=name, cache_salt="alone")
                p_alone = await ask(session, p, prompt, model=name, cache_salt="alone")
                assert answer == d_alone
                assert (p_alone == d_alone) is bool(num_loads), "the adapter changes no token"
                loads = (await metrics(session, d))["kvferry:finished_loads_total"] - before
                assert loads == num_loads
                await assert_free(session, p, d)

        for name in (SAME, *OTHER):
            asyncio.run(check(name, num_loads=int(name == SAME)))
