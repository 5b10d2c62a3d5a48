"""A small soak on a GPU: every ending of a transfer, every block free, and what it tells of device
memory.
"""

import json
import subprocess
import sys

import pytest
import torch

from kvferry.bench.soak import ABORTED_OUTCOMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl"])
def test_many_transfers_leave_nothing_behind(transport: str) -> None:
    command = [
        sys.executable,
        "-m",
        "kvferry",
        "bench",
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
        timeout=240,
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
    # So short a run is all warm-up; how memory grows is what `kvferry bench soak --transfers 10000`
    # is for.
    assert set(run["verdicts"]) == {"driver", "prefill", "decode", "gpu"}
    for name in ("prefill", "decode"):
        assert all(sample["torch_bytes"] > 0 for sample in run["samples"][name])
