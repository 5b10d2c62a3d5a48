"""Runs both vLLM benchmarks with real vLLM servers and the smallest load, and checks that every
figure is present and plausible. No time is judged.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from benchmarks.__main__ import TABLE
from tests.e2e.harness import GIVEN
from tests.vllm.fleet import PYTHON, VLLM

from kvferry.bench.vllm import servers as vllm_servers
from kvferry.cli.bench import BENCHMARKS
from kvferry.cli.cluster.processes import ChildProcess, spawn_process
from kvferry.cli.main import exit_code

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.exhaustive,
]

Bench = Callable[..., Any]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bench:
    """Runs a benchmark. Servers whose names do not start with an entry of `anew` come from the
    forkserver, which has already imported vLLM.
    """
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    # Transports that tests open in this process set environment variables of UCX and NIXL. A server
    # must see only the variables that the operator set.
    for name in [
        name for name in os.environ if name.startswith(("UCX_", "NIXL_")) and name not in GIVEN
    ]:
        monkeypatch.delenv(name)

    def run(name: str, *arguments: str, anew: tuple[str, ...] = ()) -> Any:
        def child(
            server: str, command: Sequence[str], environment: Mapping[str, str]
        ) -> ChildProcess:
            return ChildProcess(
                server,
                command,
                environment,
                spawn_process if server.startswith(anew) else VLLM.start,
            )

        monkeypatch.setattr(vllm_servers, "ChildProcess", child)
        table = BENCHMARKS if name in BENCHMARKS.entries else TABLE
        rest = [*arguments, "--json", "--vllm-python", str(PYTHON)]
        code = exit_code(lambda: table.run(name, rest))
        said = capfd.readouterr()
        assert code == 0, said.err
        # Standard output holds the result and nothing else.
        return json.loads(said.out)

    return run


def test_handover_is_measured_for_both_connectors(bench: Bench) -> None:
    result = bench("vllm-handover", "--samples", "2", "--prompt-tokens", "128", anew=("ours",))
    assert result["samples"] == 2
    (row,) = result["rows"]
    assert row["prompt_tokens"] == 128
    for who in ("ours", "stock"):
        assert (
            0
            < row[f"{who}_ms_min"]
            <= row[f"{who}_ms_p50"]
            <= row[f"{who}_ms_p90"]
            <= row[f"{who}_ms_max"]
        )
    assert row["floor_ms_p50"] > 0
    assert row["stock_transfer_ms_p50"] > 0, "the bytes did not move"
    assert row["ratio"] == pytest.approx(row["ours_ms_p50"] / row["stock_ms_p50"], rel=0.05)


def test_steps_are_measured_for_both_connectors(bench: Bench) -> None:
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
    # While leases are held, vLLM keeps stepping although it has nothing to compute.
    assert (
        min(idle["prefill", "worker"]["ours_steps"], idle["prefill", "worker"]["stock_steps"]) > 0
    )
