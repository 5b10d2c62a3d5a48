"""The handover benchmark: what it counts, between real engine processes; and how it sums up."""

import json
import subprocess
import sys

import pytest

from kvferry.bench.handover import Samples, make_rows
from kvferry.bench.handover_pair import CHUNK_TOKENS, Mode


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plane", ["shm", "nixl"])
def test_while_p_computes_all_but_the_last_chunk_moves(plane: str) -> None:
    prompt = 4 * CHUNK_TOKENS
    command = [sys.executable, "-m", "kvferry", "bench", "handover", "--json", "--plane", plane, "--samples", "3"]
    ran = subprocess.run([*command, "--prompt-tokens", str(prompt)], capture_output=True, text=True, timeout=280)
    assert ran.stdout, ran.stderr
    rows = {row["mode"]: row for row in json.loads(ran.stdout)["rows"]}
    assert [rows[mode]["tokens_left_max"] for mode in (Mode.PULL, Mode.PUSH)] == [prompt, prompt]
    assert rows[Mode.STREAMED]["tokens_left_p50"] == CHUNK_TOKENS
    assert all(row["handover_ms_p50"] > 0 for row in rows.values())


def test_a_row_sums_up_one_mode_beside_pull() -> None:
    samples = {
        Mode.PULL: Samples([0.02, 0.04, 0.03], [4096] * 3),
        Mode.PUSH: Samples([0.03], [4096]),
        Mode.STREAMED: Samples([0.015, 0.015], [512, 1024]),
    }
    pull, push, streamed = make_rows(samples)
    assert (pull["handover_ms_p50"], pull["ratio_to_pull"]) == (30.0, 1.0)
    assert (push["mode"], push["ratio_to_pull"]) == ("push", 1.0)
    assert (streamed["ratio_to_pull"], streamed["tokens_left_max"], streamed["tokens_left_p50"]) == (0.5, 1024, 768)
