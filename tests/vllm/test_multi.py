"""Tests kvferry's `MultiConnector` in real vLLM with vLLM's own connectors as children: right
tokens, and dummy KV that is saved nowhere.
"""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.harness import ask_all, metrics, new_session
from tests.vllm.fleet import PYTHON, ROOT, Fleet, ready
from tests.vllm.offline_asking import BLOCK, TOKENS
from tests.vllm.right import PROMPTS, Right
from tests.vllm.vllm_asking import assert_free

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

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
    directory: Path, model: Path, transfer: dict[str, Any] | None, *steps: str
) -> list[dict[str, Any]]:
    """The answers of vLLM's offline engine to these steps."""
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
                str(output),
                *steps,
            ],
            cwd=directory,
            env=environment,
            stdout=lines,
            stderr=lines,
            timeout=240,
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
    answers = run_offline(
        tmp_path, model, multi(NIXL, example(store)), "ask", "forget", "ask", "ask"
    )
    assert [answer["tokens"] for answer in answers] == [right_tokens] * 3
    assert answers[1]["cached"] == SAVED


def test_vllms_offloading_beside_our_connector(
    tmp_path: Path, model: Path, right_tokens: list[int]
) -> None:
    answers = run_offline(tmp_path, model, multi(NIXL, OFFLOADING), "ask", "forget", "ask")
    assert [answer["tokens"] for answer in answers] == [right_tokens] * 2
    assert [answer["cached"] for answer in answers] == [0, len(TOKENS) // BLOCK * BLOCK]


@pytest.mark.parametrize("path", ["kvferry.vllm", None])
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
