"""Tests that the benchmarks and the doctor work on a GPU with every transport, and that the right
bytes arrive.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from kvferry.cli.doctor import measure_gpu
from kvferry.cli.findings import GpuSpeeds, ProbeFailed, Severity, gpu_speed_findings, gpu_speeds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

DEADLINE_S = 200.0


def test_the_doctor_measures_every_transport() -> None:
    report = measure_gpu(0, os.environ)
    assert not isinstance(report, ProbeFailed), report.reason
    speeds = gpu_speeds(report)
    assert isinstance(speeds, GpuSpeeds)
    ways = (
        speeds.copy,
        speeds.cuda_ipc,
        speeds.nixl,
        speeds.nixl_bounce,
        speeds.nixl_contiguous,
        speeds.descriptor_us,
    )
    assert all(figure is not None and figure > 0 for figure in ways), speeds
    assert gpu_speed_findings("cuda:0", report, 1)[0].level is Severity.OK


@pytest.mark.parametrize("transport", ["cuda_ipc", "nixl bounce"])
def test_a_decode_stream_goes_on_beside_transfers(transport: str) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "decode-interference",
        "--device",
        "cuda",
        "--json",
        "--seconds",
        "1",
        "--transport",
        transport,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert [(row["pace"], row["transfers"] > 0) for row in rows] == [
        ("none", False),
        ("every 10 ms", True),
        ("without pause", True),
    ]
    assert all(row["step_ms_p50"] > 0 for row in rows)
