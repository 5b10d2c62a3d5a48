"""A model with latent attention (MLA), which vLLM's CPU build runs with a slow reference kernel and blocks of 16 tokens."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.harness import Prompt, ask, ask_all, metrics, new_session
from tests.vllm.conftest import Trio
from tests.vllm.fleet import PYTHON, Fleet, ready
from tests.vllm.vllm_asking import assert_free, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trio]:
    directory = tmp_path_factory.mktemp("latent")
    maker = Path(__file__).with_name("latent_model.py")
    subprocess.run([str(PYTHON), str(maker), str(directory / "model"), str(model)], check=True, timeout=180)
    with Fleet(directory / "fleet", directory / "model") as fleet:
        p, d = fleet.vllm("prefill", "--block-size", "16"), fleet.vllm("decode", "--block-size", "16", cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Trio(fleet, p, d, router)


def test_tokens_equal_a_single_engines(latent: Trio) -> None:
    prompts = random_prompts(12, seed=61, longest=200)

    async def check() -> None:
        assert await ask_all(latent.router, prompts, concurrency=4, timeout_s=240) == await ask_all(latent.p, prompts, timeout_s=240)
        async with new_session(120) as session:
            seen = await metrics(session, latent.d)
            assert seen["kvferry:finished_pulls_total"] == len(prompts)
            assert seen["vllm:nixl_bytes_transferred_sum"] == sum(-(-len(p.token_ids) // 16) * 16 for p in prompts) * 4 * 576 * 4
            # The control: what stands at the beginning, and was moved, is felt at the end.
            for prompt in prompts[:4]:
                other = Prompt((*reversed(prompt.token_ids[:16]), *prompt.token_ids[16:]))
                assert await ask(session, latent.p, other) != await ask(session, latent.p, prompt)
            await assert_free(session, latent.p, latent.d)

    asyncio.run(check())
