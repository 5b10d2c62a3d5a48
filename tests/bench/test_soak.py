"""Tests the soak benchmark: a small run with real engine processes that meets every kind of ending
and frees all blocks, and which results the benchmark reports as problems.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from benchmarks.soak import ABORTED_OUTCOMES, SoakOutcome, SoakResult, SoakTally

from kvferry.bench.figures import Verdict
from kvferry.bench.process_usage import cpu_seconds, parse_device_bytes, process_tree, read_usage
from kvferry.errors import KVFerryError

TRANSFERS = {"shm": 600, "nixl": 300, "tcp": 300}
"""Number of transfers, by transport."""


@pytest.fixture(scope="module")
def soaks() -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """Runs the soaks of all transports in parallel: most of the time a soak waits for abandoned
    leases to expire.
    """
    command = [sys.executable, "-m", "benchmarks", "soak", "--json", "--abort-share", "0.1"]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        started = {}
        for transport, transfers in TRANSFERS.items():
            words = [*command, "--transports", transport, "--transfers", str(transfers)]
            started[transport] = stack.enter_context(
                subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True)
            )
            stack.callback(started[transport].kill)
        yield started


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("transport", TRANSFERS)
def test_many_transfers_leave_nothing_behind(
    soaks: dict[str, "subprocess.Popen[str]"], transport: str
) -> None:
    transfers = TRANSFERS[transport]
    output, errors = soaks[transport].communicate()
    assert output, errors
    (run,) = json.loads(output)["runs"]
    assert (run["errors"], run["wrong_tokens"], run["used_blocks"]) == (
        {},
        0,
        {"prefill": 0, "decode": 0},
    )
    assert run["transfers"] >= transfers
    assert run["moved"][transport] >= transfers, "each of them was a read"
    assert set(run["aborted"]) == set(ABORTED_OUTCOMES), "each kind of end was met"
    # A run this short is all warm-up for memory use, so only open files and threads, which must not
    # grow at all, are judged.
    assert set(run["verdicts"]) == {"driver", "prefill", "decode"}
    for rows in run["verdicts"].values():
        assert rows["files"]["is_flat"]
        assert rows["threads"]["is_flat"]


def result(
    tally: SoakTally | None = None, used_blocks: int = 0, verdict: Verdict | None = None
) -> SoakResult:
    verdicts = {} if verdict is None else {"decode": {"rss_bytes": verdict}}
    return SoakResult(
        "shm", tally or SoakTally(), 1.0, {}, {}, {"prefill": used_blocks, "decode": 0}, verdicts
    )


def test_a_good_run_has_no_problems() -> None:
    good = SoakTally()
    good.outcomes.update({SoakOutcome.DONE: 10, SoakOutcome.DECODE_ABORTED: 1})
    assert result(good, verdict=Verdict(100, 104, 4)).problems == []
    assert (good.done, good.aborted) == (10, 1)


def test_growth_held_blocks_errors_and_wrong_tokens_are_problems() -> None:
    bad = SoakTally(wrong_tokens=2)
    bad.errors["the read failed"] += 3
    assert result(bad, used_blocks=7, verdict=Verdict(100, 105, 4)).problems == [
        "rss_bytes of decode grew from 100 to 105",
        "7 blocks of prefill are still in use",
        "3 requests failed: the read failed",
        "2 tokens were wrong",
    ]


def test_a_process_is_looked_at_with_all_it_holds() -> None:
    before = read_usage(os.getpid())
    assert before.rss_bytes > 2**20
    with open(os.devnull):
        assert read_usage(os.getpid()).files == before.files + 1
    assert process_tree(os.getpid())[0] == os.getpid()
    assert cpu_seconds(os.getpid()) > 0
    with pytest.raises(KVFerryError, match="cannot be inspected"):
        read_usage(2**30)


def test_the_driver_s_word_on_processes_is_read_as_far_as_it_says_something() -> None:
    assert parse_device_bytes("12, 500\n13, [N/A]\n12, 24\n\nNo running processes found\n") == {
        12: 524 * 2**20
    }
