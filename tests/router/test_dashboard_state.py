import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.dashboard.request_view import RequestDetail, state_of, view_request
from kvferry.router.dashboard.state import (
    SHOWN_LIVE,
    SHOWN_RECENT,
    InstanceFacts,
    RouterFacts,
    build_state,
    encode_state,
)
from kvferry.router.fleet.instance_metrics import MetricsWatcher, read_metrics
from kvferry.router.time_series import TimeSeries
from kvferry.router.timeline import RecentRequests, RequestEvent, RequestOutcome, Timeline
from kvferry.web.transfer_records import TransferRecord, TransferRecords, read_transfer_records

ROUTER = RouterFacts(version="1", uptime_s=5.0, policies={"prefill": "round_robin"})


def state(
    recent: RecentRequests,
    *instances: InstanceFacts,
    time_series: TimeSeries | None = None,
    now: float = 100.0,
) -> Any:
    return json.loads(
        encode_state(build_state(ROUTER, instances, time_series or TimeSeries(), recent, now))
    )


def phases(view: RequestDetail) -> list[tuple[str, float, float | None]]:
    return [(phase.name, phase.began_s, phase.ended_s) for phase in view.phases]


def handed_over() -> Timeline:
    recent = RecentRequests()
    timeline = recent.begin("r1", "/v1/completions", 100.0)
    for mark, at, about in (
        (RequestEvent.ADMITTED, 101.0, None),
        (RequestEvent.PREFILL_BEGAN, 101.0, "p1"),
        (RequestEvent.PREFILL_ENDED, 103.0, None),
        (RequestEvent.DECODE_BEGAN, 103.0, "d1"),
        (RequestEvent.FIRST_TOKEN, 104.0, None),
    ):
        timeline.mark(mark, at, about)
    recent.end(timeline, RequestOutcome.ANSWERED, 200, 106.0)
    return timeline


RECORD = TransferRecord(
    request_id="cmpl-r1-0",
    age_s=7.0,
    attached_s=0.125,
    read_began_s=0.25,
    read_ended_s=0.5,
    confirmed_s=0.625,
    scheduled_s=0.75,
    bytes=4096,
    segments=8,
    transport="shm",
)


def test_the_phases_that_a_router_knows() -> None:
    view = view_request(handed_over(), (), now=110.0)
    assert phases(view) == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.0, 3.0),
        ("decode", 3.0, 4.0),
        ("streaming", 4.0, 6.0),
    ]
    assert [phase.instance for phase in view.phases] == ["", "p1", "d1", "d1"]
    assert (view.has_transfer, view.duration_s, view.state, view.status) == (
        False,
        6.0,
        "answered",
        200,
    )


def test_where_d_tells_the_wait_for_it_is_shown_in_its_parts() -> None:
    view = view_request(handed_over(), [RECORD], now=110.0)
    assert phases(view) == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.0, 3.0),
        ("lease", 3.0, 3.125),
        ("blocks", 3.125, 3.25),
        ("transfer", 3.25, 3.5),
        ("confirm", 3.5, 3.625),
        ("scheduled", 3.625, 3.75),
        ("first token", 3.75, 4.0),
        ("streaming", 4.0, 6.0),
    ]
    assert view.has_transfer
    assert view.phases[4].detail == "4,096 bytes in 8 segments by shm"


def test_what_passed_before_d_s_engine_had_the_request_is_a_part_too() -> None:
    view = view_request(handed_over(), [msgspec.structs.replace(RECORD, age_s=6.875)], now=110.0)
    assert phases(view)[2:5] == [
        ("received", 3.0, 3.125),
        ("lease", 3.125, 3.25),
        ("blocks", 3.25, 3.375),
    ]


def test_d_s_parts_end_before_its_first_token_whatever_the_delay_of_its_words() -> None:
    """D's record took time to arrive, so its times would lie after the first token, which the
    client received long before.
    """
    record = msgspec.structs.replace(RECORD, age_s=6.0, first_token_s=0.875)
    view = view_request(handed_over(), [record], now=110.0)
    assert phases(view)[2] == ("received", 3.0, 3.125)
    assert phases(view)[-2:] == [("first token", 3.875, 4.0), ("streaming", 4.0, 6.0)]


def test_of_two_requests_with_one_name_the_record_of_the_same_age_is_shown() -> None:
    older = TransferRecord(request_id="cmpl-r1-0", age_s=500.0, attached_s=0.5, read_began_s=0.6)
    choice = TransferRecord(request_id="cmpl-r1-1", age_s=7.0)
    view = view_request(handed_over(), [older, choice, RECORD], now=110.0)
    assert ("lease", 3.0, 3.125) in phases(view)


def test_each_try_is_shown_and_why_it_failed() -> None:
    recent = RecentRequests()
    timeline = recent.begin("r", "/", 0.0)
    timeline.mark(RequestEvent.PREFILL_BEGAN, 1.0, "p1")
    timeline.mark(RequestEvent.PREFILL_FAILED, 2.0, "it cannot be reached")
    timeline.mark(RequestEvent.PREFILL_BEGAN, 2.0, "p2")
    timeline.mark(RequestEvent.PREFILL_ENDED, 3.0)
    timeline.mark(RequestEvent.DECODE_BEGAN, 3.0, "d1")
    view = view_request(timeline, (), now=9.0)
    assert phases(view) == [
        ("queued", 0.0, 1.0),
        ("prefill", 1.0, 2.0),
        ("prefill", 2.0, 3.0),
        ("decode", 3.0, None),
    ]
    assert [(phase.is_failed, phase.detail) for phase in view.phases[1:3]] == [
        (True, "it cannot be reached"),
        (False, ""),
    ]
    assert (view.retries, view.state, view.duration_s) == (1, "decode", None)


def test_a_stream_that_breaks_off_says_so() -> None:
    recent = RecentRequests()
    timeline = recent.begin("r", "/", 0.0)
    timeline.mark(RequestEvent.DECODE_BEGAN, 1.0, "d1")
    timeline.mark(RequestEvent.FIRST_TOKEN, 2.0)
    timeline.mark(RequestEvent.DECODE_FAILED, 3.0, "d1")
    recent.end(timeline, RequestOutcome.ABORTED, 200, 3.0, "d1 did not complete its answer")
    last = view_request(timeline, (), now=9.0).phases[-1]
    assert (last.name, last.ended_s, last.is_failed, last.detail) == (
        "streaming",
        3.0,
        True,
        "d1 did not complete its answer",
    )


def test_a_failed_handover_is_the_last_of_its_parts() -> None:
    recent = RecentRequests()
    timeline = recent.begin("r", "/", 0.0)
    timeline.mark(RequestEvent.DECODE_BEGAN, 1.0, "d1")
    recent.end(timeline, RequestOutcome.FAILED, 502, 4.0, "the KV could not be fetched")
    record = TransferRecord(request_id="r", age_s=8.0, attached_s=1.0, failure="P did not answer")
    view = view_request(timeline, [record], now=9.0)
    assert phases(view) == [("queued", 0.0, 1.0), ("lease", 1.0, 2.0), ("failed", 2.0, 4.0)]
    assert view.phases[-1].detail == "P did not answer"


def test_legs_that_run_at_once_overlap() -> None:
    recent = RecentRequests()
    timeline = recent.begin("r", "/", 0.0)
    for mark, at in (
        (RequestEvent.PREFILL_BEGAN, 1.0),
        (RequestEvent.DECODE_BEGAN, 1.0),
        (RequestEvent.PREFILL_ENDED, 2.0),
        (RequestEvent.FIRST_TOKEN, 3.0),
    ):
        timeline.mark(mark, at)
    assert phases(view_request(timeline, (), 4.0))[1:3] == [
        ("prefill", 1.0, 2.0),
        ("decode", 1.0, 3.0),
    ]
    assert state_of(timeline) == "streaming"


times = st.one_of(st.none(), st.floats(0, 100))


@given(
    st.lists(st.tuples(st.sampled_from(list(RequestEvent)), st.floats(0, 10)), max_size=12),
    st.one_of(st.none(), st.sampled_from(list(RequestOutcome))),
    st.lists(
        st.builds(
            TransferRecord,
            request_id=st.just("r"),
            age_s=st.floats(0, 100),
            attached_s=times,
            read_began_s=times,
            read_ended_s=times,
            confirmed_s=times,
            failure=st.text(max_size=3),
        ),
        max_size=3,
    ),
)
def test_whatever_was_marked_no_phase_ends_before_it_begins(
    marks: list[tuple[RequestEvent, float]],
    ending: RequestOutcome | None,
    records: list[TransferRecord],
) -> None:
    recent, now = RecentRequests(), 50.0
    timeline = recent.begin("r", "/", now)
    for mark, pause in marks:
        now += pause
        timeline.mark(mark, now, "somebody")
    if ending is not None:
        recent.end(timeline, ending, 500, now)
    view = view_request(timeline, records, now)
    assert view.phases[0].name == "queued"
    for phase in view.phases:
        assert phase.began_s >= 0
        assert phase.ended_s is None or phase.began_s <= phase.ended_s <= now - 50.0


def test_the_state_names_instances_with_what_their_metrics_say() -> None:
    watcher = MetricsWatcher()
    watcher.note(read_metrics(b"vllm:num_requests_running 2\nkvferry:num_leases 3\n"), now=98.0)
    known = InstanceFacts("p1", "prefill", "healthy", in_flight=1, watcher=watcher)
    silent = InstanceFacts(
        "d1", "decode", "ejected", failures=5, last_error="it cannot be reached", returns_in_s=2.5
    )
    shown = state(RecentRequests(), known, silent)["instances"]
    assert [(one["name"], one["role"], one["state"]) for one in shown] == [
        ("p1", "prefill", "healthy"),
        ("d1", "decode", "ejected"),
    ]
    assert (
        shown[0]["running"],
        shown[0]["leases"],
        shown[0]["read_age_s"],
        shown[0]["active_transfers"],
    ) == (
        2,
        3,
        2.0,
        None,
    )
    assert (shown[1]["running"], shown[1]["read_age_s"], shown[1]["returns_in_s"]) == (
        None,
        None,
        2.5,
    )


def test_the_state_has_the_tiers_of_instances_that_have_tiers() -> None:
    page = (
        "kvferry:offload_queried_tokens_total {}\nkvferry:offload_hit_tokens_total {}\n"
        'kvferry:tier_used_bytes{{tier="disk"}} 30\nkvferry:tier_max_bytes{{tier="disk"}} 40\n'
        'kvferry:tier_loaded_bytes_total{{tier="disk"}} {}\n'
        'kvferry:tier_stored_bytes_total{{tier="disk"}} {}\n'
        'kvferry:tier_refused_total{{tier="disk"}} 2\n'
    )
    watcher = MetricsWatcher()
    for now, values in ((90.0, (100, 100, 7, 7)), (95.0, (300, 250, 57, 17))):
        watcher.note(read_metrics(page.format(*values).encode()), now)
    without = MetricsWatcher()
    without.note(read_metrics(b"vllm:num_requests_running 3\n"), 95.0)
    shown = state(
        RecentRequests(),
        InstanceFacts("p1", "prefill", "healthy", watcher=watcher),
        InstanceFacts("p2", "prefill", "healthy", watcher=without),
        InstanceFacts("d1", "decode", "new"),
    )["instances"]
    assert [one["offload"] for one in shown[1:]] == [None, None]
    lookups = {"queried_tokens": 200, "hit_tokens": 150, "skipped_tokens": None, "hit_rate": 0.75}
    assert shown[0]["offload"] == {
        **lookups,
        "tiers": [
            {
                **{"name": "disk", "used_bytes": 30, "max_bytes": 40, "objects": None},
                **{"loaded_bytes_per_s": 10, "load_share": 1, "stored_bytes_per_s": 2},
                **{"evictions_per_s": None, "refused": 2, "failed_loads": None},
                **{"failed_stores": None, "dropped_stores": None},
            }
        ],
    }


def test_the_state_is_bounded_however_much_there_is() -> None:
    recent = RecentRequests()
    for number in range(2000):
        timeline = recent.begin(f"r{number}", "/", 0.0)
        if number % 2:
            recent.end(timeline, RequestOutcome.FAILED, 502, 1.0, f"error {number}")
    shown = state(recent)
    assert (len(shown["live"]), shown["num_live"], len(shown["recent"])) == (
        SHOWN_LIVE,
        1000,
        SHOWN_RECENT,
    )
    assert shown["live"][0]["id"] == "r0"
    assert shown["recent"][0]["id"] == "r1999"
    assert shown["errors"][0]["text"] == "error 1999"


def test_series_have_one_row_per_second() -> None:
    time_series = TimeSeries()
    time_series.note_end(90.0, relayed_bytes=10)
    time_series.note_ttft(0.1, 95.0)
    time_series.note_end(95.0, relayed_bytes=10, is_error=True)
    shown = state(RecentRequests(), time_series=time_series, now=100.0)
    series = shown["series"]
    assert series["last_index"] == 99
    assert series["requests"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert series["errors"] == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
    assert [value is not None for value in series["ttft_p99"]] == [False] * 5 + [True] + [False] * 4
    assert shown["headline"]["requests_per_s"] == 0.2
    assert {len(column) for column in series.values() if isinstance(column, list)} == {10}


def test_a_router_that_has_seen_nothing_has_a_state() -> None:
    shown = state(RecentRequests())
    assert (shown["instances"], shown["live"], shown["errors"], shown["series"]["requests"]) == (
        [],
        [],
        [],
        [],
    )
    assert shown["headline"]["ttft_p50"] is None
    assert shown["router"]["policies"] == {"prefill": "round_robin"}


def test_records_cross_the_wire_and_anything_else_is_none() -> None:
    assert list(read_transfer_records(msgspec.json.encode(TransferRecords([RECORD])))) == [RECORD]
    for body in (
        b"",
        b"{}",
        b"null",
        b"<html>",
        b'{"transfers":[{"request_id":1}]}',
        b"[" * 100_000,
    ):
        assert read_transfer_records(body) == ()
