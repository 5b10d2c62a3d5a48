"""Tests a short soak on a GPU: transfers end in every possible way, all blocks are free in the end,
and the report contains the device memory.
"""

import json
import subprocess
import sys

import pytest
import torch
from benchmarks.soak import ABORTED_OUTCOMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl"])
def test_many_transfers_leave_nothing_behind(transport: str) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "soak",
        "--json",
        "--device",
        "cuda",
        "--transports",
        transport,
        "--abort-share",
        "0.1",
    ]
    ran = subprocess.run(
        [*command, "--transfers", "600", "--longest", "200"],
        capture_output=True,
        text=True,
    )
    assert ran.stdout, ran.stderr
    (run,) = json.loads(ran.stdout)["runs"]
    assert (run["errors"], run["wrong_tokens"], run["used_blocks"]) == (
        {},
        0,
        {"prefill": 0, "decode": 0},
    )
    assert run["moved"][transport] >= run["transfers"] >= 600
    assert set(run["aborted"]) == set(ABORTED_OUTCOMES), "each kind of end was met"
    # A run this short is all warm-up. Use `python -m benchmarks soak --transfers 10000` to measure
    # how memory grows.
    assert set(run["verdicts"]) == {"driver", "prefill", "decode", "gpu"}
    for name in ("prefill", "decode"):
        assert all(sample["torch_bytes"] > 0 for sample in run["samples"][name])
