"""Tests the parts of the vLLM handover benchmark that need no server."""

import json

from kvferry.bench.vllm.client import PromptMaker, ServerTransferTotals
from kvferry.bench.vllm.gpu_handover import CONTENDERS
from kvferry.bench.vllm.gpu_report import AtOnce, GpuSamples, Measured, draw, table
from kvferry.bench.vllm.gpu_report import make_rows as make_gpu_rows
from kvferry.bench.vllm.handover import VllmHandoverSamples, make_rows, rounds
from kvferry.bench.vllm.servers import OURS, STOCK


def test_rounds_are_short_and_add_up() -> None:
    assert rounds(20) == [5, 5, 5, 5]
    assert rounds(2) == [2]
    assert rounds(12) == [5, 5, 2]


def test_a_row_says_what_was_asked_in_milliseconds() -> None:
    ours = VllmHandoverSamples(
        handover_s=[0.010, 0.020, 0.030], floor_s=[0.008], transfer_s=[0.004], prefill_s=[0.05]
    )
    stock = VllmHandoverSamples(handover_s=[0.040, 0.040, 1.1], floor_s=[0.009])
    (row,) = make_rows({OURS: {128: ours}, STOCK: {128: stock}})
    assert json.loads(json.dumps(row)) == row
    assert row["prompt_tokens"] == 128
    assert (row["ours_ms_p50"], row["ours_ms_p90"], row["ours_ms_min"], row["ours_ms_max"]) == (
        20.0,
        28.0,
        10.0,
        30.0,
    )
    assert (row["stock_ms_p50"], row["stock_ms_p90"]) == (40.0, 888.0)
    assert row["ratio"] == 0.5
    assert (row["floor_ms_p50"], row["transfer_ms_p50"], row["target_ms"]) == (8.0, 4.0, 14.0)
    assert (row["stock_floor_ms_p50"], row["stock_transfer_ms_p50"]) == (9.0, None)


def test_without_transfer_times_there_is_no_target() -> None:
    ours = VllmHandoverSamples(handover_s=[0.010], floor_s=[0.008])
    (row,) = make_rows({OURS: {128: ours}, STOCK: {128: ours}})
    assert (row["transfer_ms_p50"], row["target_ms"]) == (None, None)


def test_a_transfers_time_is_what_was_added() -> None:
    before = ServerTransferTotals(count=2, seconds=1.0)
    assert ServerTransferTotals(4, 1.5).mean_since(before) == 0.25
    assert before.mean_since(before) is None


def test_no_two_prompts_are_alike_and_a_seed_gives_the_same_ones() -> None:
    one, other = PromptMaker(1), PromptMaker(1)
    first = one.make(40)
    assert len(first) == 40
    assert first == other.make(40)
    assert first != one.make(40)
    assert first != PromptMaker(2).make(40)


def test_on_a_gpu_every_length_has_a_row_for_each_connector_and_failures_are_named() -> None:
    samples = GpuSamples(
        handover_s=[0.110, 0.120, 0.150],
        floor_s=[0.100],
        transfer_s=[0.004],
        descriptors=[1.0],
    )
    measured = {
        name: Measured({1000: GpuSamples(), 32_000: samples}, AtOnce([0.1, 0.3], 2.5))
        for name in CONTENDERS
    }
    measured["stock tuned"].first_contact += [(2.0, 1.5), (0.04, 0.03)]
    measured["stock"] = Measured({1000: GpuSamples(), 32_000: GpuSamples()}, failure="no answer")
    result = make_gpu_rows(measured, num_at_once=8, at_once_tokens=4000)
    assert json.loads(json.dumps(result)) == result
    assert [row["prompt_tokens"] for row in result["rows"]] == [1000] * 4 + [32_000] * 4
    row = next(row for row in result["rows"] if row["handover_ms_p50"])
    assert (row["handover_ms_p50"], row["handover_ms_max"]) == (120.0, 150.0)
    assert (row["floor_ms_p50"], row["over_floor_ms"]) == (100.0, 20.0)
    assert (row["transfer_ms_p50"], row["descriptors_p50"]) == (4.0, 1.0)
    assert [row["total_s"] for row in result["at_once"]] == [2.5] * 3
    first = [row["handover_ms"] for row in result["first_contact"]]
    assert first == [1500.0, 30.0]
    shown = table(result)
    assert all(name in shown for name in CONTENDERS)
    assert "stock failed: no answer" in shown
    plot = draw(result)
    assert plot.startswith("<svg")
    assert plot.count("<polyline") == len(CONTENDERS) + 1
