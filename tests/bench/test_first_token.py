"""Tests how the benchmark of the first token sums up its samples; and, with real engines, that both
routers give the same tokens.
"""

import json
import subprocess
import sys

import pytest
from benchmarks.first_token import LENGTHS, Sample, make_rows


def test_a_row_sums_up_one_length_beside_the_usual_path() -> None:
    samples = [
        Sample(128, is_from_p, first_s, first_s + 0.01, first_s + 0.05)
        for is_from_p, first_s in ((False, 0.04), (True, 0.01), (True, 0.03), (False, 0.04))
    ]
    usual, early = make_rows(samples)
    assert (usual["first_token_from"], early["first_token_from"]) == ("D", "P")
    assert (usual["of_usual"], early["of_usual"]) == (1.0, 0.5)
    assert (early["ttft_ms_p50"], early["ttft_ms_worst"]) == (20.0, 30.0)
    assert (early["second_token_ms_p50"], early["last_token_ms_p50"]) == (30.0, 70.0)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_runs_and_compares_the_tokens_of_both_routers() -> None:
    command = [sys.executable, "-m", "benchmarks", "first-token", "--samples", "1", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.stdout, ran.stderr
    assert len(json.loads(ran.stdout)["rows"]) == 2 * len(LENGTHS)
