"""Tests the lease benchmark: a small run with real processes and heartbeats, and which results it
reports as problems.
"""

import json
import subprocess
import sys
from typing import Any

import pytest
from benchmarks.leases import judge_rows


def row(
    leases: int,
    us: float = 20.0,
    idle: float = 0.004,
    left: int | None = None,
    side: str = "prefill",
) -> dict[str, Any]:
    kept = leases if left is None else left
    return {
        "transport": "shm",
        "leases": leases,
        "side": side,
        "us_per_step": us,
        "idle_share": idle,
        "leases_at_end": kept,
    }


def test_what_is_flat_and_cheap_is_no_problem() -> None:
    assert (
        judge_rows(
            [
                row(10),
                row(10_000, us=25.0, idle=0.009),
                row(10, side="decode"),
                row(10_000, side="decode"),
            ]
        )
        == []
    )


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (
            row(10_000, us=51.0),
            "a step with 10,000 leases by shm on the prefill side takes 51.0 µs, more than 50",
        ),
        (
            row(10_000, us=41.0),
            "a step by shm on the prefill side takes at least 2 times as long with the most "
            "leases as with the fewest",
        ),
        (
            row(10_000, idle=0.02),
            "an idle process with 10,000 leases by shm on the prefill side takes 2.00% of a core, "
            "more than 1%",
        ),
        (
            row(10_000, left=9_000),
            "9,000 of 10,000 leases by shm on the prefill side were left at the end",
        ),
    ],
)
def test_what_is_dear_grows_or_is_lost_is_a_problem(bad: dict[str, Any], sentence: str) -> None:
    assert sentence in judge_rows([bad, row(10)])


@pytest.mark.slow
def test_leases_are_renewed_beyond_their_time_by_real_heartbeats() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "leases",
        "--json",
        "--transports",
        "shm",
        "--leases",
        "10",
        "300",
    ]
    ran = subprocess.run(
        [*command, "--lease-seconds", "6", "--seconds", "1", "--idle-seconds", "1"],
        capture_output=True,
        text=True,
    )
    assert ran.stdout, ran.stderr
    rows = json.loads(ran.stdout)["rows"]
    assert [(row["leases"], row["side"]) for row in rows] == [
        (10, "prefill"),
        (10, "decode"),
        (300, "prefill"),
        (300, "decode"),
    ]
    assert all(row["leases_at_end"] == row["leases"] and row["steps"] > 0 for row in rows)
