"""Tests that the router's chaos run is repeatable and detects violations, and that a short run with
real processes finds none. `make chaos-router` is the long run.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.chaos.judge import Attempt
from tests.chaos.router.plan import FaultKind, make_plan
from tests.chaos.router.run import Report, Settings
from tests.chaos.router.verdict import FAULTS, Happened, Verdict, decide

ROOT = Path(__file__).parents[3]
NAMES = (
    ["prefill-0", "prefill-1", "prefill-2"],
    ["decode-0", "decode-1", "decode-2"],
    ["prefill-2", "decode-2"],
)
RIGHT = (4, 5, 6)
D = "http://127.0.0.1:8200"
CUT = (
    f"decode instance {D} did not complete its answer: it closed the connection in the middle of "
    "an answer"
)
KILLED = Happened(kills=[(15.0, D)])


def test_the_same_seed_gives_the_same_plan_and_another_gives_another() -> None:
    assert make_plan(1, 120, *NAMES) == make_plan(1, 120, *NAMES) != make_plan(2, 120, *NAMES)


def test_a_plan_has_every_deed_and_removes_nobody_who_registered_himself() -> None:
    plan = make_plan(3, 120, *NAMES)
    assert {planned.fault_kind for planned in plan} == set(FaultKind)
    assert not any(
        planned.target in NAMES[2]
        for planned in plan
        if planned.fault_kind in (FaultKind.DRAIN, FaultKind.REPLACE)
    )
    assert {
        planned.target for planned in plan if planned.fault_kind is FaultKind.KILL_DECODE
    } <= set(NAMES[1])


@pytest.mark.parametrize(
    ("attempt", "happened", "verdict"),
    [
        (Attempt(200, [4, 5, 6], is_whole=True), Happened(), Verdict.RIGHT),
        (Attempt(200, [4, 5, 7], is_whole=True), KILLED, Verdict.WRONG),
        (Attempt(200, [5], error=CUT), KILLED, Verdict.WRONG),
        (Attempt(200, [4, 5], error=CUT), KILLED, Verdict.BROKEN),
        (Attempt(200, [4, 5], error=CUT), Happened(), Verdict.LOST),
        (Attempt(200, [4, 5], error=CUT), Happened(kills=[(15.0, D + "1")]), Verdict.LOST),
        (Attempt(200, [4, 5], error=CUT), Happened(kills=[(3.0, D)]), Verdict.LOST),
        (Attempt(200, [], error=CUT), KILLED, Verdict.LOST),
        (Attempt(502, error=CUT), KILLED, Verdict.LOST),
        (Attempt(500, error="a bug"), KILLED, Verdict.LOST),
        (Attempt(503, error="nobody"), KILLED, Verdict.LOST),
        (Attempt(503, error="nobody"), Happened(deserted=[(12.0, 14.0)]), Verdict.DESERTED),
        (Attempt(429, error="too many"), Happened(deserted=[(25.0, 26.0)]), Verdict.LOST),
        (Attempt(502, error="nobody"), Happened(deserted=[(12.0, 14.0)]), Verdict.LOST),
        (Attempt(error="connection refused"), KILLED, Verdict.LOST),
        (Attempt(200, [4]), KILLED, Verdict.SILENT),
        (Attempt(200, [4], is_overdue=True), KILLED, Verdict.HUNG),
        (Attempt(200, [4], has_left=True), Happened(), Verdict.LEFT),
    ],
)
def test_a_request_from_10_to_20_is_judged(
    attempt: Attempt, happened: Happened, verdict: Verdict
) -> None:
    assert decide(attempt, RIGHT, 10.0, 20.0, happened) is verdict


def test_every_verdict_in_capitals_is_a_fault() -> None:
    assert {verdict for verdict in Verdict if str(verdict).isupper()} == set(FAULTS)


def test_a_report_is_one_line_for_people_and_json_for_others() -> None:
    report = Report(
        Settings(7),
        done=Counter({FaultKind.DRAIN: 2}),
        verdicts=Counter({Verdict.RIGHT: 3}),
        until_serving_again_s=[1.0, 3.0, 2.0],
    )
    read = json.loads(json.dumps(report.as_json()))
    assert (read["done"], read["verdicts"], read["is_clean"]) == (
        {str(FaultKind.DRAIN): 2},
        {str(Verdict.RIGHT): 3},
        True,
    )
    assert read["until_serving_again_s"] == {"count": 3, "median": 2.0, "max": 3.0}
    assert report.line().endswith("clean")
    report.violations.append("x")
    assert report.line().endswith("BROKEN: 1 violations")


@pytest.mark.slow
def test_a_short_chaos_run_of_a_router_is_clean(tmp_path: Path) -> None:
    words = [
        "--seed",
        "7",
        "--duration-s",
        "12",
        "--size",
        "2",
        "--streams",
        "20",
        "--questions",
        "30",
        "--conversations",
        "12",
    ]
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "router",
        *words,
        "--json",
        str(tmp_path / "report.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["done"]  # on a busy machine 12 s may be enough for one fault only
    assert report["verdicts"][str(Verdict.RIGHT)] > 20
