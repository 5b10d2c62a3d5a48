"""Both benchmarks for real, with the smallest load: every number is there and makes sense. No time is judged here."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"


def bench(*arguments: str) -> Any:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    command = [sys.executable, "-m", "kvferry", "bench", *arguments, "--json", "--vllm-python", str(PYTHON)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr
    # Standard output is the result and nothing else.
    return json.loads(done.stdout)


def test_handover_is_measured_for_both_connectors() -> None:
    result = bench("vllm-handover", "--samples", "2", "--prompt-tokens", "128")
    assert result["samples"] == 2
    (row,) = result["rows"]
    assert row["prompt_tokens"] == 128
    for who in ("ours", "stock"):
        assert 0 < row[f"{who}_ms_min"] <= row[f"{who}_ms_p50"] <= row[f"{who}_ms_p90"] <= row[f"{who}_ms_max"]
    assert row["floor_ms_p50"] > 0
    assert row["stock_transfer_ms_p50"] > 0, "the bytes did not move"
    assert row["ratio"] == pytest.approx(row["ours_ms_p50"] / row["stock_ms_p50"], rel=0.05)


def test_steps_are_measured_for_both_connectors() -> None:
    result = bench("vllm-steps", "--requests", "4", "--concurrency", "2")
    assert {(row["role"], row["side"]) for row in result["rows"]} == {
        (role, side) for role in ("prefill", "decode") for side in ("scheduler", "worker")
    }
    for row in result["rows"]:
        assert min(row["ours_steps"], row["stock_steps"]) >= 4, row
        assert min(row["ours_us_per_step"], row["stock_us_per_step"]) > 0
        assert row["ours_methods"][0]["calls"] > 0
    assert min(result["handover"][f"{who}_ms_p50"] for who in ("ours", "stock")) > 0
    idle = {(row["role"], row["side"]): row for row in result["idle_rows"]}
    # While leases are held, vLLM steps on although nothing is to be computed.
    assert min(idle["prefill", "worker"]["ours_steps"], idle["prefill", "worker"]["stock_steps"]) > 0
