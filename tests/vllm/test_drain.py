"""A vLLM server with kvferry's connector that is asked to end: `kvferry drain` waits for the blocks
that peers may still read, and after SIGTERM vLLM keeps them until they are read.
"""

import asyncio

import pytest
from tests.deploy.test_leaving import drain
from tests.e2e.harness import Prompt, ask, metrics, new_session, prefill
from tests.vllm.conftest import Trio
from tests.vllm.fleet import ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPTS = [Prompt(tuple(range(first, first + 90)), max_tokens=12) for first in (20, 300)]
END_S = 60.0


def test_a_vllm_that_ends_serves_its_leases_first(trio: Trio) -> None:
    patient = {"kv_lease_duration": 600}
    p = trio.fleet.vllm("ending prefill", "--shutdown-timeout", "60", extra=patient)
    ready(p)

    async def check() -> None:
        async with new_session() as session:
            # Another salt keeps D from using its prefix cache.
            right = [await ask(session, trio.d, prompt, cache_salt="x") for prompt in PROMPTS]
            params = [await prefill(session, p, prompt) for prompt in PROMPTS]
            held = await asyncio.to_thread(drain, p, 0.1)
            assert (held.returncode, "still has work" in held.stderr) == (1, True)
            before = (await metrics(session, trio.d))["kvferry:finished_loads_total"]
            found = [await ask(session, trio.d, PROMPTS[0], kv_transfer_params=params[0])]
            p.process.terminate()
            # The router relies on both (tests/router/test_aborted_answers.py).
            late = await ask(session, p, PROMPTS[0])
            assert late.body["choices"][0]["finish_reason"] == "abort"
            assert late.token_ids == ((),)
            async with session.get(f"{p.url}/health") as response:
                assert response.status == 200
            found.append(await ask(session, trio.d, PROMPTS[1], kv_transfer_params=params[1]))
            assert found == right
            assert (await metrics(session, trio.d))["kvferry:finished_loads_total"] == before + 2
            drained = await asyncio.to_thread(drain, trio.p, 60)
            assert drained.returncode == 0, drained.stderr
            await asyncio.to_thread(p.process.wait, END_S)

    asyncio.run(check())
