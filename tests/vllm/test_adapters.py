"""Tests LoRA adapters in real vLLM: D uses P's KV only if both engines have loaded the same
adapter, whatever its name is and whatever its folder holds by now.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import PREFILL_PARAMS, Engine, ask, metrics, new_session
from tests.vllm.adapters import write_adapter
from tests.vllm.fleet import Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

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
        can_load = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        p = fleet.vllm("p", *flags["p"], environment=can_load)
        d = fleet.vllm("d", *flags["d"], cores="1", environment=can_load)
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
        router = fleet.kvferry_router([p], [d], {"XDG_RUNTIME_DIR": str(tmp_path)})
        ready(router)
        key = (tmp_path / "kvferry" / "admin-key").read_text().strip()
        asyncio.run(check_loading(router, d, write_adapter(tmp_path / "late", seed=9), key))


async def check_loading(router: Engine, d: Engine, adapter: Path, admin_key: str) -> None:
    """Check that the router loads an adapter on both engines, which then use each other's KV."""
    prompt = random_prompts(1, seed=4, shortest=200, longest=300)[0]
    named = {"lora_name": "late", "lora_path": str(adapter)}
    as_admin = {"Authorization": f"Bearer {admin_key}"}
    async with new_session(60) as session:

        async def change(verb: str, headers: dict[str, str]) -> tuple[int, Any]:
            url = f"{router.url}/v1/{verb}_lora_adapter"
            async with session.post(url, json=named, headers=headers) as answer:
                return answer.status, await answer.json()

        assert (await change("load", {}))[0] == 401
        status, body = await change("load", as_admin)
        assert (status, [one["status"] for one in body["instances"]]) == (200, [200, 200])
        before = (await metrics(session, d))["kvferry:finished_loads_total"]
        answer = await ask(session, router, prompt, model="late")
        assert answer == await ask(session, d, prompt, model="late", cache_salt="alone")
        assert (await metrics(session, d))["kvferry:finished_loads_total"] == before + 1
        status, body = await change("load", as_admin)
        assert status == 400
        assert "already been loaded" in body["error"]["message"]
        assert (await change("unload", as_admin))[0] == 200
        assert (await ask(session, router, prompt, model="late")).status == 404
        assert (await change("unload", as_admin))[0] == 404
        # P lacks the adapter, as an instance does that joins after the adapter was loaded.
        async with session.post(f"{d.url}/v1/load_lora_adapter", json=named) as loaded:
            assert loaded.status == 200
        assert await ask(session, router, prompt, model="late") == answer
