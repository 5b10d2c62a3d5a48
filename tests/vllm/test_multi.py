"""Tests kvferry's `MultiConnector` in real vLLM with kvferry's and vLLM's own connectors as
children: right tokens, and dummy KV that is saved nowhere.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tests.e2e.harness import Engine, Prompt, ask_all, metrics, new_session
from tests.tiers.storages import mounted
from tests.vllm.fleet import PYTHON, ROOT, Fleet, ready
from tests.vllm.offline_asking import BLOCK, TOKENS
from tests.vllm.right import BYTES_PER_TOKEN, PROMPTS, Right
from tests.vllm.test_tiers import until_stored
from tests.vllm.vllm_asking import assert_free

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
STOCK = "vllm.distributed.kv_transfer.kv_connector.v1"
DUMMY = {
    "kv_connector": "DecodeBenchConnector",
    "kv_connector_module_path": f"{STOCK}.decode_bench_connector",
    "kv_role": "kv_both",
}
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_connector_module_path": f"{STOCK}.offloading_connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 1 << 28,
        "spec_name": "HostSpec",
        "spec_module_path": "tests.vllm.inside.host_spec",
    },
}
"""vLLM's own offloading, with copies in host memory that work without a GPU."""
SAVED = (len(TOKENS) - 2) // BLOCK * BLOCK
"""How many tokens of the prompt vLLM's ExampleConnector saves."""


def example(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "kv_connector": "ExampleConnector",
        "kv_connector_module_path": f"{STOCK}.example_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def multi(*children: dict[str, Any], path: str | None = "kvferry.vllm") -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": path,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def run_offline(
    directory: Path, model: Path, transfer: dict[str, Any] | None, *steps: str, **settings: Any
) -> list[dict[str, Any]]:
    """The answers to these steps of vLLM's offline engine with these settings."""
    output, log = directory / "answers.json", directory / "log"
    output.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "KVFERRY_SECRET": "a secret for tests",
        "KVFERRY_SIDE_CHANNEL_PORT": "0",
    }
    with log.open("wb") as lines:
        subprocess.run(
            [
                str(PYTHON),
                str(ROOT / "tests/vllm/offline_asking.py"),
                str(model),
                json.dumps(transfer),
                json.dumps(settings),
                str(output),
                *steps,
            ],
            cwd=directory,
            env=environment,
            stdout=lines,
            stderr=lines,
            check=False,
        )
    assert output.exists(), log.read_text()[-8000:]
    found = json.loads(output.read_text())
    assert Path(found["kvferry"]).is_relative_to(ROOT)
    answers: list[dict[str, Any]] = found["answers"]
    return answers


@pytest.fixture(scope="module")
def right_tokens(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[int]:
    (answer,) = run_offline(tmp_path_factory.mktemp("plain"), model, None, "ask")
    tokens: list[int] = answer["tokens"]
    return tokens


@pytest.mark.exhaustive
def test_two_stores_of_one_class_both_save_and_either_loads(
    tmp_path: Path, model: Path, right_tokens: list[int]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    steps = ["ask", "forget", str(one), "ask", "forget", str(other), "ask"]
    answers = run_offline(tmp_path, model, multi(example(one), example(other)), *steps)
    assert [answer["tokens"] for answer in answers] == [right_tokens] * 3
    # The second answer loaded from the other store; what came from there is saved in the first.
    assert [answer["cached"] for answer in answers] == [0, SAVED, SAVED]


def test_a_store_beside_our_connector(tmp_path: Path, model: Path, right_tokens: list[int]) -> None:
    store = tmp_path / "store"
    steps = ["ask", "forget", "ask", "ask", "forget", "ask with salt"]
    answers = run_offline(tmp_path, model, multi(NIXL, example(store)), *steps)
    assert [answer["tokens"] for answer in answers] == [right_tokens] * 4
    assert answers[1]["cached"] == SAVED
    # The names of this child's files do not contain the salt.
    assert answers[3]["cached"] == 0


@pytest.mark.exhaustive
def test_a_prompt_that_is_computed_in_several_steps_is_not_saved_incomplete(
    tmp_path: Path, model: Path, right_tokens: list[int]
) -> None:
    """vLLM's ExampleConnector saves the blocks of a prompt in its first step, computed or not."""
    store = tmp_path / "store"
    answers = run_offline(
        tmp_path,
        model,
        multi(example(store)),
        *["ask", "forget", "ask"],
        max_num_batched_tokens=SAVED - 16,
        max_num_seqs=8,
    )
    assert [answer["tokens"] for answer in answers] == [right_tokens] * 2
    assert not list(store.iterdir())


@pytest.mark.exhaustive
def test_vllms_simple_offloading_cannot_start_on_a_cpu(tmp_path: Path, model: Path) -> None:
    simple = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    with pytest.raises(AssertionError, match="has no attribute 'priority_range'"):
        run_offline(tmp_path, model, multi(NIXL, simple), "ask")


@pytest.mark.exhaustive
def test_damage_that_vllms_example_connector_notices_costs_only_the_child(
    tmp_path: Path, model: Path, right_tokens: list[int]
) -> None:
    good, truncated, incomplete, changed = (
        tmp_path / name for name in ("good", "truncated", "incomplete", "changed")
    )
    good_child = example(good)
    good.rmdir()  # a missing folder is created
    run_offline(tmp_path, model, multi(good_child), "ask")
    for copy in (truncated, incomplete, changed):
        shutil.copytree(good, copy)
    for path in truncated.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    min(incomplete.rglob("*.safetensors")).unlink()
    for path in changed.rglob("*.safetensors"):
        data = path.read_bytes()
        path.write_bytes(data[:-4096] + bytes(byte ^ 1 for byte in data[-4096:]))
    wrong = example(tmp_path / "wrong")
    (tmp_path / "wrong").rmdir()
    (tmp_path / "wrong").write_text("not a folder")
    with mounted(tmp_path / "full", "tmpfs", "size=64k,mode=700") as full:
        children = [wrong, example(full), *map(example, (truncated, incomplete, good, changed))]
        transfer = {**multi(*children), "kv_load_failure_policy": "recompute"}
        steps = ["ask", "forget", "ask", "forget", "ask", "forget", str(good), "ask"]
        answers = run_offline(tmp_path, model, transfer, *steps, async_scheduling=False)
    assert [answer["tokens"] for answer in answers[:3]] == [right_tokens] * 3
    assert [answer["cached"] for answer in answers[2:]] == [SAVED] * 2
    # Valid files with other values are not noticed: the control that files are used.
    assert answers[3]["tokens"] != right_tokens
    log = (tmp_path / "log").read_text()
    calls = ["save_kv_layer", "save_kv_layer", "start_load_kv", "start_load_kv"]
    for index, call in enumerate(calls):
        assert f"child connector failed child=ExampleConnector[{index}] call={call}" in log
    assert "child=ExampleConnector[4] call" not in log


def test_vllms_offloading_beside_our_connector(
    tmp_path: Path, model: Path, right_tokens: list[int]
) -> None:
    answers = run_offline(tmp_path, model, multi(NIXL, OFFLOADING), "ask", "forget", "ask")
    assert [answer["tokens"] for answer in answers] == [right_tokens] * 2
    assert [answer["cached"] for answer in answers] == [0, len(TOKENS) // BLOCK * BLOCK]


@pytest.mark.parametrize("path", ["kvferry.vllm", pytest.param(None, marks=pytest.mark.exhaustive)])
def test_dummy_kv_is_saved_by_vllms_multi_connector_and_not_by_ours(
    tmp_path: Path, model: Path, right_tokens: list[int], path: str | None
) -> None:
    store = tmp_path / "store"
    children = [example(store), DUMMY]
    if path is not None:
        children.insert(0, NIXL)
    answers = run_offline(tmp_path, model, multi(*children, path=path), "ask", "ask")
    assert answers[0]["cached"] == len(TOKENS) - 1
    # Dummy values give other tokens: the control that they were used.
    assert answers[0]["tokens"] != right_tokens
    assert bool(list(store.iterdir())) == (path is None)


def test_tokens_through_p_and_d_with_a_store_in_both(
    tmp_path: Path, model: Path, right: Right
) -> None:
    prompts, answers = PROMPTS[:24], right.vllm[:24]
    (tmp_path / "fleet").mkdir()
    with Fleet(tmp_path / "fleet", model) as fleet:
        flag = "--disable-hybrid-kv-cache-manager"
        p = fleet.vllm("prefill", flag, transfer=multi(NIXL, example(tmp_path / "p")))
        d = fleet.vllm("decode", flag, transfer=multi(NIXL, example(tmp_path / "d")), cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)

        async def check() -> None:
            assert await ask_all(router, prompts, concurrency=8, timeout_s=240) == answers
            async with new_session(60) as session:
                found = await metrics(session, d)
                assert found["kvferry:finished_loads_total"] == len(prompts)
                await assert_free(session, p, d)

        asyncio.run(check())
    assert list((tmp_path / "p").iterdir())


@pytest.fixture
def pools() -> Iterator[Path]:
    """A folder in memory, because tiers map their pools."""
    folder = Path(mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def tier(pool: Path) -> dict[str, Any]:
    """kvferry's offloading."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "tiers": [{"cpu": "256MiB"}],
            "pool_path": str(pool),
            # Tests must load what was stored, also where this model computes faster.
            "break_even": False,
        },
    }


async def loaded_blocks(engine: Engine) -> tuple[float, float]:
    """How many blocks came from P, and how many from the tier."""
    async with new_session(60) as session:
        await assert_free(session, engine)
        found = await metrics(session, engine)
    moved_bytes = found.get("kvferry:transfer_bytes_total", 0)
    return moved_bytes / (BLOCK * BYTES_PER_TOKEN), found.get("kvferry:tier_loads_total/cpu", 0)


def test_a_d_that_has_a_prefix_in_its_tier_fetches_only_the_rest_from_p(
    tmp_path: Path, model: Path, right: Right, pools: Path
) -> None:
    """P and D have a tier of their own; neither has a prefix cache."""
    answers = dict(zip(PROMPTS, right.vllm, strict=True))
    long = max(PROMPTS, key=lambda prompt: len(prompt.token_ids))
    head = Prompt(long.token_ids[: 20 * BLOCK], max_tokens=1)
    # An engine always computes the last token, so a tier can have all other KV of this prompt.
    short = next(prompt for prompt in PROMPTS if len(prompt.token_ids) == 2 * BLOCK + 1)
    with Fleet(tmp_path, model) as fleet:
        flag = "--no-enable-prefix-caching"
        p = fleet.vllm("p", flag, transfer=multi(NIXL, tier(pools / "p")))
        d = fleet.vllm("d", flag, transfer=multi(NIXL, tier(pools / "d")), cores="1")
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)

        async def check() -> None:
            async def ask(prompt: Prompt) -> tuple[float, float]:
                """Check the answer, and count the blocks that D has loaded for it."""
                before = await loaded_blocks(d)
                [answer] = await ask_all(router, [prompt])
                assert answer == answers.get(prompt, answer)
                assert answer.is_ok, answer.body
                after = await loaded_blocks(d)
                return after[0] - before[0], after[1] - before[1]

            async def stored(num_blocks: int) -> None:
                for engine in (p, d):
                    await until_stored(engine, "cpu", num_blocks)

            num_full_blocks = len(long.token_ids) // BLOCK
            assert await ask(head) == (20, 0)
            await stored(20)
            assert await ask(long) == (num_full_blocks + 1 - 20, 20)
            assert await ask(short) == (3, 0)
            await stored(num_full_blocks + 2)
            assert await ask(short) == (0, 2)
            # P has used its own tier, too.
            assert await loaded_blocks(p) == (0, 20 + 2)
            found = await ask_all(router, PROMPTS[:24], concurrency=8, timeout_s=240)
            assert found == right.vllm[:24]

        asyncio.run(check())
