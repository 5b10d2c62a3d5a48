"""Tests the transfer benchmark with its two real processes: its results, and that nothing outlives
the benchmark.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.transports.mooncake_agents import AGENT, skip_without_mooncake

from kvferry.bench.transfer.command import Scope, measure
from kvferry.bench.transfer.device import DeviceAllocator
from kvferry.bench.transfer.moves import Blocks, Pattern, plan_move
from kvferry.bench.transfer.processes import BenchConsumer, Shape, start_producer
from kvferry.bench.transfer.report import make_baselines, make_device_rows
from kvferry.cli.runtime import StopRequest
from kvferry.errors import KVFerryError

DEADLINE_S = 60.0
QUICK = [sys.executable, "-m", "kvferry", "bench", "transfer", "--quick"]
pytestmark = pytest.mark.slow


def children(pid: int) -> list[int]:
    """The child processes of `pid` that have not ended."""
    everybody = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [each for each in everybody if parent_of(each) == pid]


def parent_of(pid: int) -> int | None:
    """The parent of `pid`; None if the process has ended, even if its exit code has not been
    collected yet.
    """
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Runs the benchmark and yields its process and its children once it has begun to measure."""
    with subprocess.Popen(
        [*QUICK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            assert any("segments of 4 KiB" in line for line in process.stderr)
            yield process, children(process.pid)
        finally:
            process.kill()


def assert_all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while any(parent_of(pid) is not None for pid in pids):
        assert time.monotonic() < deadline, f"left behind: {pids}"
        time.sleep(0.05)


def test_every_transport_is_measured_in_every_size_and_pattern(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    ran = subprocess.run(
        [*QUICK, "--rounds", "1", "--json", "--plot", str(plot)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    # Not every machine has mooncake, and on a busy one its rate may be rounded to 0.
    rows = [row for row in told["rows"] if row["transport"] != "mooncake"]
    cells = [(row["transport"], row["segment_bytes"], row["pattern"]) for row in rows]
    assert sorted(cells) == sorted(
        (transport, kib * 1024, pattern)
        for transport in ("shm", "nixl", "tcp")
        for kib in (4, 16, 64, 256, 1024)
        for pattern in ("scattered", "runs")
    )
    assert all(row[key] > 0 for row in rows for key in ("gbps", "of_memcpy", "of_raw_nixl"))
    assert all(
        row["copies"] * 8 <= row["segments"] for row in told["rows"] if row["pattern"] == "runs"
    )
    assert all(
        row["copies"] > row["segments"] / 2 for row in told["rows"] if row["pattern"] == "scattered"
    )
    assert plot.read_text().startswith("<svg")


def test_a_transport_that_fails_is_shown_with_its_reason_and_the_others_are_measured() -> None:
    skip_without_mooncake()
    with running("--rounds", "2", "--segments", "4", "16", "--json") as (process, _):
        for child in psutil.Process(process.pid).children(recursive=True):
            if AGENT in child.cmdline():
                child.kill()
        said, _ = process.communicate()
    assert process.returncode == 1
    rows = json.loads(said)["rows"]
    for row in rows:
        if row["transport"] == "mooncake":
            assert "Mooncake" in row["failed"]
            assert row["gbps"] is None
        else:
            assert row["failed"] is None
            assert row["gbps"] > 0
    assert {row["transport"] for row in rows} == {"shm", "nixl", "tcp", "mooncake"}


@pytest.mark.exhaustive
def test_without_nixl_the_rest_is_measured(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("raise ImportError('not on this machine')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [*QUICK, "--rounds", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert ran.returncode == 0, ran.stderr
    assert "NIXL is not installed" in ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert {row["transport"] for row in rows} - {"mooncake"} == {"shm", "tcp"}
    assert {row["of_raw_nixl"] for row in rows} == {None}


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive), signal.SIGKILL],
)
def test_nothing_outlives_a_benchmark_that_is_stopped(number: signal.Signals) -> None:
    with running("--rounds", "1000") as (process, started):
        assert started
        process.send_signal(number)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == (-number if number == signal.SIGKILL else 130)
        assert "Traceback" not in said
        assert_all_end(started)


def test_a_producer_that_dies_ends_the_benchmark_with_a_reason() -> None:
    with running("--rounds", "1000") as (process, started):
        for pid in started:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"spawn_main" in command:
                os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode not in (0, None)
        assert "Traceback" not in said
        assert "read" in said
        assert_all_end(started)


def test_more_memory_than_there_is_is_refused_before_any_is_taken() -> None:
    ran = subprocess.run(
        [*QUICK, "--spread", "99999"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ran.returncode != 0
    assert "--spread 99999" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_sizes_can_be_chosen_and_those_that_do_not_fit_are_refused() -> None:
    ran = subprocess.run(
        [*QUICK, "--rounds", "1", "--json", "--segments", "32", "--moved", "2", "4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [
        (row["segment_bytes"], row["pattern"], row["segments"])
        for row in told["rows"]
        if row["transport"] == "shm"
    ] == [
        (32768, "scattered", 128),
        (32768, "runs", 128),
        (32768, "scattered", 64),
        (32768, "runs", 64),
    ]
    refused = subprocess.run(
        [*QUICK, "--segments", "65536"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "leave nothing to move" in refused.stderr


def test_bytes_that_went_astray_are_noticed() -> None:
    shape = Shape(2, 1 << 20)
    move = plan_move(Blocks(4096, 2, 256), Pattern.SCATTERED, 2, 0)
    with start_producer(shape) as producer, BenchConsumer.connected(shape, producer) as consumer:
        with pytest.raises(KVFerryError, match="wrong bytes"):
            consumer.check(move)
        consumer.prepare(move)
        consumer.read("shm")
        consumer.check(move)
        consumer.overwrite()
        consumer.prepare(plan_move(Blocks(4096, 2, 256), Pattern.SCATTERED, 2, 1))
        consumer.read("shm")
        with pytest.raises(KVFerryError, match="wrong bytes"):
            consumer.check(move)
        assert np.count_nonzero(move.local_blocks >= 256) == 128


def test_what_runs_on_a_gpu_runs_on_the_processor_too() -> None:
    """Every method except CUDA's own runs on the CPU, in two move sizes, the slow methods with a
    part of the move. The benchmark verifies that each method delivers the right bytes.
    """
    scope = Scope((4, 64, 2048), (16, 4), regions=2, rounds=2, method_s=0.05, max_descriptors=64)
    cells = measure(DeviceAllocator(None), scope, 1, StopRequest())
    rows, baselines = make_device_rows(cells), make_baselines(cells)
    assert {row["transport"] for row in rows} == {"nixl", "nixl bounce"}
    found = [
        (row["segment_bytes"] // 1024, row["pattern"], row["moved_bytes"] >> 20)
        for row in rows
        if row["transport"] == "nixl"
    ]
    patterns = ("scattered", "runs")
    assert found == [(kib, pattern, 16) for kib in (4, 64) for pattern in patterns] + [
        (2048, "scattered", 16)
    ] + [(kib, pattern, 4) for kib in (4, 64) for pattern in patterns] + [(2048, "scattered", 4)]
    small = [(row["transport"], row["timed_bytes"]) for row in rows if row["segment_bytes"] == 4096]
    assert (
        small
        == [("nixl", 64 * 4096), ("nixl bounce", 16 << 20)] * 2
        + [("nixl", 64 * 4096), ("nixl bounce", 4 << 20)] * 2
    )
    assert all(
        row[key] > 0
        for row in rows
        for key in ("gbps", "of_memcpy", "of_raw_nixl", "of_contiguous_nixl", "median_us")
    )
    assert all(
        each[key] > 0
        for each in baselines
        for key in ("memcpy_gbps", "raw_nixl_gbps", "raw_nixl_write_gbps", "contiguous_nixl_gbps")
    )
