"""Tests the benchmark of decode steps beside transfers: its figures, and a full run with a real
model and a real producer on this machine.
"""

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from benchmarks.decode_interference import (
    HEADROOM_TOKENS,
    BackgroundReader,
    DecodeStream,
    Pace,
    StepTimes,
    make_rows,
)

from kvferry.bench.transfer.memory import HostAllocator
from kvferry.bench.transfer.moves import Blocks, Pattern, plan_move
from kvferry.bench.transfer.processes import Shape, start_producer
from kvferry.engine.make_model.writer import make_model
from kvferry.errors import KVFerryError

COMMAND = [sys.executable, "-m", "benchmarks", "decode-interference"]


def test_rows_compare_every_pace_with_decoding_alone() -> None:
    alone, beside = (
        StepTimes([0.010] * 99 + [0.020]),
        StepTimes([0.011] * 50 + [0.013] * 50, [0.002] * 10),
    )
    rows = make_rows({Pace.NONE: alone, Pace.EVERY_10_MS: beside, Pace.WITHOUT_PAUSE: StepTimes()})
    assert [row["pace"] for row in rows] == ["none", "every 10 ms", "without pause"]
    assert (
        rows[0]["step_ms_p50"],
        rows[0]["p50_ratio"],
        rows[0]["p99_ratio"],
        rows[0]["transfers"],
    ) == (10.0, 1.0, 1.0, 0)
    assert (rows[1]["step_ms_p50"], rows[1]["p50_ratio"], rows[1]["step_ms_p99"]) == (
        12.0,
        1.2,
        13.0,
    )
    assert (rows[1]["transfers"], rows[1]["transfer_ms_p50"], rows[1]["moved_gbps"]) == (
        10,
        2.0,
        0.56,
    )
    assert (rows[2]["step_ms_p50"], rows[2]["p50_ratio"], rows[2]["moved_gbps"]) == (
        None,
        None,
        None,
    )


def test_a_stream_decodes_for_ever_within_its_blocks(tmp_path: Path) -> None:
    make_model(tmp_path / "model", family="llama")
    with closing(DecodeStream.opened(tmp_path / "model", "cpu", "float32", 2, 20)) as stream:
        for _ in range(HEADROOM_TOKENS + 2):
            stream.step()


@pytest.mark.slow
def test_a_transfer_that_fails_is_told_to_whoever_decodes() -> None:
    shape = Shape(2, 1 << 20)
    move = plan_move(Blocks(4096, 2, 256), Pattern.SCATTERED, 2, 0)
    with (
        start_producer(shape, only="tcp") as producer,
        closing(BackgroundReader(HostAllocator(), shape, producer, "shm", move)) as arrivals,
        pytest.raises(KVFerryError, match="no transport shm"),
    ):
        arrivals.start()


@pytest.mark.slow
def test_no_transfer_is_counted_for_the_pace_that_follows() -> None:
    shape = Shape(2, 16 << 20)
    move = plan_move(Blocks(4096, 2, 4096), Pattern.SCATTERED, 2, 0)
    with (
        start_producer(shape, only="tcp") as producer,
        closing(BackgroundReader(HostAllocator(), shape, producer, "tcp", move)) as reader,
    ):
        reader.start()
        for _ in range(20):
            reader.set_pace(Pace.WITHOUT_PAUSE)
            while not reader.take_durations():
                time.sleep(0.001)
            reader.set_pace(Pace.NONE)
            assert reader.take_durations() == []
            time.sleep(0.02)
            assert reader.take_durations() == []


@pytest.mark.slow
def test_every_pace_is_measured_in_one_run() -> None:
    ran = subprocess.run(
        [*COMMAND, "--json", "--seconds", "0.8", "--context", "64"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert [(row["pace"], row["transfers"] > 0) for row in told["rows"]] == [
        ("none", False),
        ("every 10 ms", True),
        ("without pause", True),
    ]
    assert all(
        row[key] > 0
        for row in told["rows"]
        for key in ("steps", "step_ms_p50", "step_ms_p99", "p50_ratio", "p99_ratio")
    )
    assert told["machine"]["transport"] == "shm"


@pytest.mark.slow
def test_a_device_or_transport_that_is_not_there_is_refused_in_a_sentence() -> None:
    for arguments, label in (
        (["--device", "tpu"], "cpu, cuda or cuda:N"),
        (["--transport", "nope"], "no transport nope"),
    ):
        ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode != 0
        assert label in ran.stderr
        assert "Traceback" not in ran.stderr
