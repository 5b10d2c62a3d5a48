"""Tests that the chaos run is repeatable and detects violations, and that a short run with real
processes finds none. `make chaos` is the long run.
"""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos.judge import VIOLATIONS, Attempt, Outcome, judge
from tests.chaos.mode import Mode
from tests.chaos.plan import Kind, make_plan
from tests.chaos.run import Report, Settings

ROOT = Path(__file__).parents[2]
RIGHT = (4, 5, 6)
WHOLE = Attempt(200, [4, 5, 6], is_whole=True)
NAMES = (["prefill-0", "prefill-1"], ["decode-0"], "router")


def test_the_same_seed_gives_the_same_plan_and_another_gives_another() -> None:
    assert make_plan(1, 300, *NAMES) == make_plan(1, 300, *NAMES)
    assert make_plan(1, 300, *NAMES) != make_plan(2, 300, *NAMES)


def test_a_plan_has_injuries_of_every_kind_for_the_right_targets() -> None:
    plan = make_plan(3, 300, *NAMES)
    assert {fault.kind for fault in plan} == set(Kind)
    assert {fault.target for fault in plan if fault.kind is Kind.KILL_PREFILL} <= {
        "prefill-0",
        "prefill-1",
    }
    assert all(fault.target == "router" for fault in plan if fault.kind is Kind.KILL_ROUTER)
    assert all(fault.at_s < 300 for fault in plan)


def test_a_fleet_of_both_kinds_has_prefill_engines_of_both_and_decode_engines_that_do_both() -> (
    None
):
    lives = [Mode.BOTH.prefill_connectors(index) for index in (0, 1)]
    assert {first for first, *_ in lives} == {"NixlConnector", "NixlPushConnector"}
    assert all(len(set(each)) == 2 for each in lives), (
        "a restarted one comes back as the other kind"
    )
    assert (
        Mode.BOTH.decode_connectors
        == Mode.PUSH.decode_connectors
        == Mode.PUSH.prefill_connectors(0)
        == ("NixlPushConnector",)
    )
    assert Mode.PULL.decode_connectors == Mode.PULL.prefill_connectors(1) == ("NixlConnector",)


@pytest.mark.parametrize(
    ("attempt", "outcome"),
    [
        (WHOLE, Outcome.RIGHT),
        (Attempt(200, [4, 5, 7], is_whole=True), Outcome.WRONG),
        (Attempt(200, [4, 5], is_whole=True), Outcome.WRONG),
        (Attempt(200, [4, 5, 6, 7], is_whole=True), Outcome.WRONG),
        (Attempt(200, [4, 5], error="D broke off"), Outcome.BROKEN),
        (Attempt(200, [5], error="D broke off"), Outcome.WRONG),
        (Attempt(200, [4, 5]), Outcome.SILENT),
        (Attempt(502, error="P is gone"), Outcome.REFUSED),
        (Attempt(502), Outcome.ODD),
        (Attempt(500, error="a bug"), Outcome.ODD),
        (Attempt(error="refused"), Outcome.UNREACHED),
        (Attempt(200, [4], is_overdue=True), Outcome.HUNG),
        (Attempt(200, [4], has_left=True), Outcome.LEFT),
        (Attempt(200, [9], has_left=True), Outcome.WRONG),
    ],
)
def test_what_a_client_saw_is_judged(attempt: Attempt, outcome: Outcome) -> None:
    assert judge(attempt, RIGHT) is outcome


def test_every_outcome_in_capitals_is_a_violation() -> None:
    assert {outcome for outcome in Outcome if str(outcome).isupper()} == set(VIOLATIONS)
    assert judge(replace(WHOLE, tokens=[0, 0, 0]), RIGHT) in VIOLATIONS


def test_a_report_can_be_written_as_json() -> None:
    report = Report(
        Settings(7), injected=Counter({Kind.LONG_CUT: 2}), outcomes=Counter({Outcome.RIGHT: 3})
    )
    read = json.loads(json.dumps(report.as_json()))
    assert (read["settings"]["seed"], read["injected"], read["outcomes"]) == (
        7,
        {str(Kind.LONG_CUT): 2},
        {str(Outcome.RIGHT): 3},
    )
    assert read["is_clean"]


@pytest.mark.slow
def test_a_short_chaos_run_is_clean(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "--seed",
        "7",
        "--duration-s",
        "20",
        "--streams",
        "20",
        "--prompts",
        "40",
    ]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "report.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["is_clean"]
    assert sum(report["injected"].values()) >= 4
    assert report["outcomes"][str(Outcome.RIGHT)] > 20
