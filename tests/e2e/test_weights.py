"""Tests that engines whose weights differ in 40 of 4,096 rows of the embedding exchange no KV."""

import asyncio
from pathlib import Path

import pytest
from tests.checkpoints import put_checkpoint
from tests.e2e.harness import Cluster, Prompt, ask_all, assert_said, metrics, new_session

pytestmark = pytest.mark.slow

PROMPTS = [Prompt(tuple(range(100 + first, 300))) for first in range(4)]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_p_and_d_with_nearly_equal_weights_exchange_no_kv(tmp_path: Path, policy: str) -> None:
    for name, seed in (("p", 1), ("d", 2), ("same", 2)):
        put_checkpoint(tmp_path / name, seed)
    with Cluster(tmp_path, tmp_path / "d") as cluster:
        starting = [
            cluster.serve(name, model=tmp_path / name, policy=policy) for name in ("p", "d", "same")
        ]
        p, d, same = (each.ready() for each in starting)
        through_p, through_same = (cluster.proxy([each], [d]).ready() for each in (p, same))

        async def check() -> None:
            async with new_session(120) as session:
                right = await ask_all(d, PROMPTS, cache_salt="alone")
                assert right != await ask_all(p, PROMPTS, cache_salt="alone")
                answers = await ask_all(through_p, PROMPTS, cache_salt="nearly equal")
                if policy == "fail":
                    assert {answer.status for answer in answers} == {502}
                else:
                    assert answers == right
                await assert_said(d, "weights")
                assert (await metrics(session, d)).get("kvferry:finished_loads_total", 0) == 0
                # The control: other files, the same weights.
                assert await ask_all(through_same, PROMPTS, cache_salt="equal") == right
                assert (await metrics(session, d))["kvferry:finished_loads_total"] == len(PROMPTS)

        asyncio.run(check())
