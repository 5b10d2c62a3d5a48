"""Tests the doctor's findings about GPUs, which it derives from benchmark figures."""

import os
from pathlib import Path

import msgspec
import pytest

from kvferry.bench.transfer.moves import Blocks, Pattern, plan_move
from kvferry.bench.transfer.report import TransferCell, make_baselines, make_device_rows
from kvferry.cli.doctor import measure_gpu, rdma_devices
from kvferry.cli.findings import (
    GpuReport,
    GpuSpeeds,
    ProbeFailed,
    Severity,
    TorchReport,
    bounce_advice_bytes,
    bounce_finding,
    gpu_memory_findings,
    gpu_speed_findings,
    gpu_speeds,
    peer_access_finding,
    rdma_finding,
    torch_finding,
    ucx_settings_finding,
    vllm_finding,
)
from kvferry.vllm.release import TESTED

SETTINGS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y", "UCX_RCACHE_MAX_UNRELEASED": "1024"}
GPU = "cuda:0 (H200)"
NEVER = float("inf")
"""Stands in for a time: the transport was available but moved nothing."""


def report(**seconds: float) -> GpuReport:
    """A report as the benchmark writes it: 128 MiB in segments of 16 KiB; NIXL with one descriptor
    per segment moves a sixteenth of that.
    """
    move = plan_move(Blocks(16384, 8, 1024), Pattern.SCATTERED, 1, 0)
    part = move.part(512)
    named = {name.replace("_by_", " "): [value] for name, value in seconds.items()}
    copies = {"cuda_ipc": 1, "nixl": 500, "nixl bounce": 8}
    told = {name: copies[name] for name in named if name in copies}
    named = {name: times for name, times in named.items() if times != [NEVER]}
    cells = [TransferCell(move, Pattern.SCATTERED, named, told, {"nixl": part, "raw nixl": part})]
    return msgspec.json.decode(
        msgspec.json.encode({"rows": make_device_rows(cells), "baselines": make_baselines(cells)}),
        type=GpuReport,
    )


WHOLE = {
    "memcpy": 64e-6,
    "cuda_ipc": 71e-6,
    "nixl": 4500e-6,
    "nixl_by_bounce": 268e-6,
    "raw_by_nixl": 5e-3,
    "raw_by_nixl_by_contiguous": 107e-6,
}


def test_speeds_are_read_from_the_benchmarks_rows() -> None:
    speeds = gpu_speeds(report(**WHOLE))
    assert isinstance(speeds, GpuSpeeds)
    assert speeds.segment_bytes == 16384
    assert (round(speeds.copy), round(speeds.cuda_ipc or 0), round(speeds.nixl_bounce or 0)) == (
        2097,
        1890,
        501,
    )
    assert round(speeds.nixl_contiguous or 0) == 1254
    assert speeds.descriptor_us == pytest.approx(9.0)
    assert speeds.nixl == pytest.approx(1.86)


def test_a_transport_that_moved_nothing_does_not_hide_the_others() -> None:
    speeds = gpu_speeds(report(**WHOLE | {"nixl": NEVER}))
    assert isinstance(speeds, GpuSpeeds)
    assert (speeds.nixl, speeds.descriptor_us) == (None, None)
    assert round(speeds.cuda_ipc or 0) == 1890


@pytest.mark.parametrize(
    ("staged_gbps", "descriptor_us", "advised"),
    [
        (500.0, 9.0, 8 << 20),
        (28.0, 9.0, 256 << 10),
        (500.0, 1e6, 64 << 20),
        (None, 9.0, None),
        (500.0, None, None),
    ],
)
def test_staging_is_advised_up_to_where_both_are_as_fast(
    staged_gbps: float | None, descriptor_us: float | None, advised: int | None
) -> None:
    speeds = GpuSpeeds(16384, 2000, 1800, 1.7, staged_gbps, 1200, descriptor_us)
    assert bounce_advice_bytes(speeds) == advised


def test_the_transport_that_would_be_chosen_is_told_with_the_reason() -> None:
    speed, transport = gpu_speed_findings(GPU, report(**WHOLE), 256 << 10)
    assert (speed.level, transport.level) == (Severity.OK, Severity.OK)
    assert "copies at 2,097 GB/s" in speed.text
    assert "cuda_ipc 1,890 GB/s, nixl 1.9 GB/s, nixl bounce 501 GB/s" in speed.text
    assert "9.0 µs for each descriptor, and 1,254 GB/s for one long segment" in speed.text
    assert (
        "cuda_ipc within this host, at 0.90 of the speed of the device's own copy" in transport.text
    )
    assert "set bounce_max_segment_bytes to 8388608 (the default is 262144)" in transport.text
    assert "below 8 MiB, the default" in gpu_speed_findings(GPU, report(**WHOLE), 8 << 20)[1].text


def test_what_does_not_work_or_is_slow_is_advice() -> None:
    without_ipc = gpu_speed_findings(
        GPU, report(**{name: took for name, took in WHOLE.items() if name != "cuda_ipc"}), 1
    )[1]
    assert (without_ipc.level, "nixl within this host too" in without_ipc.text) == (
        Severity.ADVICE,
        True,
    )
    only_ipc = gpu_speed_findings(GPU, report(memcpy=64e-6, cuda_ipc=71e-6), 1)[1]
    assert "NIXL cannot move memory of this GPU" in only_ipc.text
    slow = gpu_speed_findings(GPU, report(**(WHOLE | {"cuda_ipc": 640e-6})), 1)[1]
    assert (slow.level, "is another process using" in slow.text) == (Severity.ADVICE, True)
    for failed in (ProbeFailed("no answer within 60 s"), GpuReport([], [])):
        [finding] = gpu_speed_findings(GPU, failed, 1)
        assert (finding.level, "the speed could not be measured" in finding.text) == (
            Severity.ADVICE,
            True,
        )


def test_the_bounce_buffer_is_named_with_its_size_and_the_moment_of_its_allocation() -> None:
    finding = bounce_finding(GPU, 1 << 30, 256 << 10)
    assert finding.level is Severity.OK
    assert f"{GPU}: 1024 MiB, allocated when the first NIXL transfer" in finding.text
    assert "segments below 256 KiB" in finding.text
    assert "bounce_buffer_bytes sets the size" in finding.text


def test_settings_of_ucx_are_told_with_who_made_them() -> None:
    ours = ucx_settings_finding(SETTINGS, {})
    assert (
        ours.text
        == "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y (set by kvferry), UCX_RCACHE_MAX_UNRELEASED=1024 "
        "(set by kvferry)"
    )
    assert ours.level is Severity.OK
    theirs = ucx_settings_finding(SETTINGS, {"UCX_RCACHE_MAX_UNRELEASED": "64"})
    assert "UCX_RCACHE_MAX_UNRELEASED=64 (set by you)" in theirs.text
    slow = ucx_settings_finding(SETTINGS, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"})
    assert (slow.level, "unset the variable" in slow.text) == (Severity.ADVICE, True)


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_survived() -> None:
    answer = measure_gpu(999, os.environ)
    assert isinstance(answer, ProbeFailed)
    assert "not a GPU" in answer.reason


GIB = 2**30
TWO_GPUS = TorchReport(
    "2.13.0", ["H200", "H200"], "13.0", [140 * GIB] * 2, [139 * GIB, 70 * GIB], [(0, 1)], "2.28.9"
)


def test_a_gpu_that_others_use_is_named_with_a_share_that_fits() -> None:
    (found,) = gpu_memory_findings(TWO_GPUS)
    assert found.level is Severity.ADVICE
    assert "cuda:1: 70.0 of 140.0 GiB" in found.text
    assert found.text.endswith("--gpu-memory-utilization to 0.47")


def test_gpus_that_cannot_read_each_other_are_named() -> None:
    found = peer_access_finding(TWO_GPUS)
    assert (found.level, "GPUs 0 and 1 cannot" in found.text) == (Severity.ADVICE, True)
    together = TorchReport("2.13.0", ["H200", "H200"])
    assert peer_access_finding(together).level is Severity.OK


def test_rdma_devices_are_listed_with_their_state(tmp_path: Path) -> None:
    assert rdma_finding(rdma_devices(tmp_path)).level is Severity.ADVICE
    for name, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        found = rdma_finding(rdma_devices(tmp_path))
        assert found.level is (Severity.OK if "ACTIVE" in state else Severity.ADVICE)
    assert found.text == "mlx5_0 (1: DOWN), mlx5_1 (4: ACTIVE)"


def test_vllm_and_nccl_are_reported_by_version() -> None:
    for version in (*TESTED, f"{TESTED[-1]}+cpu"):
        assert vllm_finding(version).text == f"{version}, as tested with kvferry"
    assert vllm_finding("0.32.1").level is Severity.OK
    assert vllm_finding(None).level is Severity.OK
    other = vllm_finding("0.40.0")
    assert (other.level, f"vllm=={TESTED[-1]}" in other.text) == (Severity.ADVICE, True)
    assert "NCCL 2.28.9" in torch_finding(TWO_GPUS).text
