"""Tests the parts of the vLLM step benchmark that need no server."""

import json
from pathlib import Path

import pytest
from benchmarks.vllm_steps import (
    SideTotals,
    Totals,
    make_handover,
    make_rows,
    read_totals,
    subtract,
)

from kvferry.bench.vllm.servers import OURS, ROLES, STOCK
from kvferry.errors import KVFerryError

STEP = {"scheduler": "build_connector_meta", "worker": "get_transfer_results"}


def measured(steps: int, seconds: float) -> dict[tuple[str, str], SideTotals]:
    return {
        (role, side): SideTotals(
            side,
            {
                STEP[side]: Totals(steps, seconds, seconds / 2, 0.01),
                "start_load_kv": Totals(1, 0.5, 0.5, 0.5),
            },
        )
        for role in ROLES
        for side in STEP
    }


def test_time_per_step_counts_every_method_and_divides_by_steps() -> None:
    rows = make_rows(
        {OURS: measured(steps=1000, seconds=0.5), STOCK: measured(steps=2000, seconds=7.5)}
    )
    assert [(row["role"], row["side"]) for row in rows] == [
        (role, side) for role in ROLES for side in STEP
    ]
    assert json.loads(json.dumps(rows)) == rows
    row = rows[0]
    assert (row["ours_us_per_step"], row["stock_us_per_step"], row["ratio"]) == (
        1000.0,
        4000.0,
        0.25,
    )
    assert (row["ours_steps"], row["stock_steps"]) == (1000, 2000)
    assert (row["ours_cpu_us_per_step"], row["stock_cpu_us_per_step"]) == (750.0, 2125.0)
    assert row["stock_methods"][0] == {
        "method": "build_connector_meta",
        "calls": 2000,
        "us_per_step": 3750.0,
        "max_us": 10000.0,
    }


def test_without_steps_there_is_no_time_per_step() -> None:
    nothing = {key: SideTotals(totals.side, {}) for key, totals in measured(1, 1.0).items()}
    row = make_rows({OURS: nothing, STOCK: measured(10, 1.0)})[0]
    assert (row["ours_us_per_step"], row["ratio"], row["ours_steps"]) == (None, None, 0)


def test_what_happened_before_is_taken_off() -> None:
    between = subtract(measured(steps=30, seconds=3.0), measured(steps=10, seconds=1.0))
    totals = between["prefill", "worker"]
    assert (totals.steps, totals.methods["get_transfer_results"].total_s) == (20, 2.0)
    assert totals.methods["start_load_kv"].calls == 0


def test_totals_are_read_from_every_process_and_starting_up_is_no_step(tmp_path: Path) -> None:
    text = {"build_connector_meta": {"calls": 3, "total_s": 0.5, "cpu_s": 0.25, "max_s": 0.25}}
    starting = {"register_kv_caches": {"calls": 1, "total_s": 9.0, "cpu_s": 9.0, "max_s": 9.0}}
    for role in ROLES:
        (tmp_path / role).mkdir()
        for side in STEP:
            (tmp_path / role / f"{side}-77.json").write_text(json.dumps(text | starting))
    assert read_totals(tmp_path)["decode", "scheduler"] == SideTotals(
        "scheduler", {"build_connector_meta": Totals(3, 0.5, 0.25, 0.25)}
    )
    (tmp_path / "decode" / "worker-77.json").unlink()
    with pytest.raises(KVFerryError, match="the worker of the decode server wrote 0 files"):
        read_totals(tmp_path)


def test_handover_under_load_is_told_for_both() -> None:
    told = make_handover({OURS: [0.01, 0.03], STOCK: [0.04]})
    assert told == {
        "ours_ms_p50": 20.0,
        "ours_ms_p90": 28.0,
        "stock_ms_p50": 40.0,
        "stock_ms_p90": 40.0,
        "ratio": 0.5,
    }
