"""Tests the handover benchmark: the bytes it counts between real engine processes, and how it
summarises samples.
"""

import json
import subprocess
import sys

import pytest
from benchmarks.handover import CHUNK_TOKENS, HandoverSamples, Mode, Moved, make_rows

TOKEN_BYTES = 4 * 2 * 2 * 64 * 4
"""KV bytes per token: 4 layers, 2 heads, K and V, 64 floats of 4 bytes each."""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("transport", "prompt_tokens"), [("tcp", 3 * CHUNK_TOKENS), ("nixl", 4 * CHUNK_TOKENS)]
)
def test_while_p_computes_all_but_the_last_chunk_moves(transport: str, prompt_tokens: int) -> None:
    """The chunks move in every handover, not only in most, whether P writes (tcp) or D reads
    (nixl). Without streaming, and in pull mode, all bytes are left to move after prefill: the
    benchmark counts bytes that really moved.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "handover",
        "--json",
        "--transport",
        transport,
        "--samples",
        "2",
    ]
    ran = subprocess.run(
        [*command, "--prompt-tokens", str(prompt_tokens)],
        capture_output=True,
        text=True,
    )
    assert ran.stdout, ran.stderr
    told = json.loads(ran.stdout)
    assert (told["prompt_tokens"], told["chunk_tokens"], told["bytes_per_token"]) == (
        prompt_tokens,
        512,
        TOKEN_BYTES,
    )
    rows = {row["mode"]: row for row in told["rows"]}
    everything, last_chunk = prompt_tokens * TOKEN_BYTES, CHUNK_TOKENS * TOKEN_BYTES
    assert {row["bytes_total"] for row in rows.values()} == {everything}
    left = {mode: (row["bytes_left_p50"], row["bytes_left_max"]) for mode, row in rows.items()}
    assert left == {
        Mode.PULL: (everything,) * 2,
        Mode.PUSH: (everything,) * 2,
        Mode.STREAMED: (last_chunk,) * 2,
    }
    assert all(row["handover_ms_p50"] > 0 for row in rows.values())


def test_a_row_sums_up_one_mode_beside_pull() -> None:
    samples = {
        Mode.PULL: HandoverSamples([0.02, 0.04, 0.03], [Moved(4096, 0)] * 3),
        Mode.PUSH: HandoverSamples([0.03], [Moved(4096, 0)]),
        Mode.STREAMED: HandoverSamples([0.015, 0.015], [Moved(4096, 3584), Moved(4096, 3072)]),
    }
    pull, push, streamed = make_rows(samples)
    assert (pull["handover_ms_p50"], pull["handover_ms_max"], pull["ratio_to_pull"]) == (
        30.0,
        40.0,
        1.0,
    )
    assert (push["mode"], push["ratio_to_pull"], push["bytes_left_max"]) == ("push", 1.0, 4096)
    assert (streamed["ratio_to_pull"], streamed["bytes_total"]) == (0.5, 4096)
    assert (streamed["bytes_left_p50"], streamed["bytes_left_max"]) == (768, 1024)
