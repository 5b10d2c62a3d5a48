"""Tests the transfer log: what an engine records about requests whose KV came from a peer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.messages import (
    AddRequest,
    RequestOutput,
    SampledToken,
    SamplingParams,
    SequenceSlice,
)
from kvferry.engine.transfer_log import MAX_REPORTED, TransferLog
from kvferry.events import TransferTimes

PULLED: dict[str, Any] = {"do_remote_prefill": True}
TOKEN = SampledToken(7)


def request(name: str, params: dict[str, Any] | None = None) -> AddRequest:
    return AddRequest(name, [1, 2, 3], SamplingParams(), params)


def planned(name: str) -> SequenceSlice:
    return SequenceSlice(name, (1,), 2, ((0,),), None)


def test_a_request_s_times_are_durations_since_it_came() -> None:
    log = TransferLog()
    log.note_arrival(request("cmpl-x-0-0a0a0a0a", PULLED), now=100.0)
    log.note_receives(
        {
            "cmpl-x-0-0a0a0a0a": [
                TransferTimes(100.5, 101.0, 102.0, 102.0, 103.0, 104.0, 4096, 8, "shm")
            ]
        }
    )
    log.note_plan([planned("cmpl-x-0-0a0a0a0a")], now=105.0)
    log.note_plan([planned("cmpl-x-0-0a0a0a0a")], now=105.5)
    log.note_outputs([RequestOutput("cmpl-x-0-0a0a0a0a", [TOKEN])], now=106.0)
    log.note_outputs([RequestOutput("cmpl-x-0-0a0a0a0a", [TOKEN])], now=107.0)
    (record,) = log.records("x", now=110.0)
    assert (record.age_s, record.attached_s, record.allocated_s, record.read_began_s) == (
        10,
        1,
        2,
        2,
    )
    assert (record.read_ended_s, record.confirmed_s, record.scheduled_s, record.first_token_s) == (
        3,
        4,
        5,
        6,
    )
    assert (record.bytes, record.segments, record.transport, record.failure) == (4096, 8, "shm", "")


def test_of_several_ranks_the_last_counts_except_for_the_beginning_and_bytes_add_up() -> None:
    log = TransferLog()
    log.note_arrival(request("r", PULLED), now=0.0)
    log.note_receives({"r": [TransferTimes(0.0, 1.0, 2.0, 2.0, 3.0, 5.0, 10, 1, "shm")]})
    log.note_receives({"r": [TransferTimes(0.0, 1.5, 2.5, 2.5, 4.0, 4.5, 20, 2, "shm")]})
    (record,) = log.records("r", now=9.0)
    assert (
        record.attached_s,
        record.allocated_s,
        record.read_began_s,
        record.read_ended_s,
        record.confirmed_s,
    ) == (1.5, 2.5, 2, 4, 5)
    assert (record.bytes, record.segments) == (30, 3)


def test_a_failure_is_kept_and_nothing_else_is_made_up() -> None:
    log = TransferLog()
    log.note_arrival(request("r", PULLED), now=0.0)
    log.note_outputs(
        [RequestOutput("r", finish_reason="error", error="P is gone" + "!" * 1000)], now=3.0
    )
    (record,) = log.records("r", now=9.0)
    assert record.failure.startswith("P is gone!")
    assert len(record.failure) == 400
    assert (record.first_token_s, record.read_began_s, record.confirmed_s) == (None, None, None)


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True}, {"do_remote_prefill": False}]
)
def test_requests_that_fetch_nothing_are_not_remembered(params: dict[str, Any] | None) -> None:
    log = TransferLog()
    log.note_arrival(request("r", params), now=0.0)
    assert not log.is_watching
    assert log.records("", now=1.0) == []


def test_a_step_pays_only_for_requests_without_a_first_token() -> None:
    log = TransferLog()
    for name in ("a", "b", "c"):
        log.note_arrival(request(name, PULLED), now=0.0)
    log.note_outputs(
        [RequestOutput("a", [TOKEN]), RequestOutput("b", finish_reason="error", error="no")],
        now=1.0,
    )
    assert log.is_watching
    log.forget("c")
    assert not log.is_watching
    assert len(log.records("", now=2.0)) == 3


@pytest.mark.parametrize(
    "sent", ["x", "x-7", "a-b-0", "0a0a0a0a", "cmpl-x", "-", "é", "x-0-0a0a0a0a"]
)
def test_a_request_is_found_by_the_id_that_its_client_sent(sent: str) -> None:
    log = TransferLog()
    for index in range(2):
        log.note_arrival(request(f"chatcmpl-{sent}-{index}-1b2b3b4b", PULLED), now=0.0)
    log.note_arrival(request("cmpl-another-0-1b2b3b4b", PULLED), now=0.0)
    assert [record.request_id for record in log.records(sent, now=1.0)] == [
        f"chatcmpl-{sent}-{index}-1b2b3b4b" for index in (1, 0)
    ]
    assert log.records("nobody", now=1.0) == []
    assert len(log.records(f"chatcmpl-{sent}-0-1b2b3b4b", now=1.0)) == 1


def test_only_the_newest_are_kept_and_fewer_are_shown() -> None:
    log = TransferLog(max_records=100)
    for number in range(1000):
        log.note_arrival(request(f"r{number}", PULLED), now=0.0)
    shown = log.records("", now=1.0)
    assert [record.request_id for record in shown] == [
        f"r{number}" for number in range(999, 999 - MAX_REPORTED, -1)
    ]
    assert log.records("r900", now=1.0)
    assert not log.records("r899", now=1.0)
    log.note_receives({"r0": [TransferTimes(0.0)]})
    log.note_outputs([RequestOutput(f"r{number}", [TOKEN]) for number in range(900, 1000)], now=1.0)
    assert not log.is_watching


@given(st.text(), st.lists(st.text(max_size=12), max_size=5))
def test_any_name_can_be_asked_for(name: str, known: list[str]) -> None:
    log = TransferLog()
    for other in known:
        log.note_arrival(request(other, PULLED), now=0.0)
    assert {record.request_id for record in log.records(name, now=0.0)} <= set(known)
