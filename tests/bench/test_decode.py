"""Tests the decode benchmark: it measures what it is asked to, on a real engine without prefill."""

import json
import subprocess
import sys

import pytest
from benchmarks.decode import make_row


@pytest.mark.slow
def test_every_context_and_batch_has_a_row() -> None:
    command = [sys.executable, "-m", "benchmarks", "decode", "--json"]
    ran = subprocess.run(
        [*command, "--context", "40,3000", "--batch", "1,3", "--output-tokens", "6"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    asked = [(row["context_tokens"], row["batch"]) for row in told["rows"]]
    assert asked == [(40, 1), (40, 3), (3000, 1), (3000, 3)]
    assert told["output_tokens"] == 6
    assert all(row["token_ms_p50"] > 0 and row["tokens_per_s"] > 0 for row in told["rows"])


def test_only_gaps_while_all_requests_decode_are_counted() -> None:
    row = make_row(100, [[0.0, 9.0, 10.0, 10.1, 10.2], [9.5, 10.0, 10.1, 10.2, 17.0]])
    assert (row["context_tokens"], row["batch"]) == (100, 2)
    assert row["token_ms_p50"] == 100.0
    assert row["tokens_per_s"] == 20.0


def test_a_wrong_number_is_named() -> None:
    command = [sys.executable, "-m", "benchmarks", "decode", "--batch", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "--batch" in ran.stderr
