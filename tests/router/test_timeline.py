from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.timeline import (
    MAX_MARKS,
    MAX_TEXT_CHARS,
    RecentRequests,
    RequestEvent,
    RequestOutcome,
    Timeline,
)


def test_a_request_is_live_until_it_ends_and_then_recent() -> None:
    recent = RecentRequests()
    timeline = recent.begin("r1", "/v1/completions", now=10.0)
    assert [one.request_id for one in recent.live()] == ["r1"]
    assert list(recent.newest_first()) == []
    timeline.mark(RequestEvent.ADMITTED, 10.5)
    recent.end(timeline, RequestOutcome.ANSWERED, 200, now=11.0)
    assert recent.num_live == 0
    assert list(recent.newest_first()) == [timeline]
    assert (timeline.ended, timeline.outcome, timeline.status) == (
        11.0,
        RequestOutcome.ANSWERED,
        200,
    )


def test_a_second_end_changes_nothing() -> None:
    recent = RecentRequests()
    timeline = recent.begin("r1", "/", now=0.0)
    recent.end(timeline, RequestOutcome.ABANDONED, 0, now=1.0)
    recent.end(timeline, RequestOutcome.FAILED, 502, now=2.0, error="too late")
    assert (timeline.outcome, timeline.ended) == (RequestOutcome.ABANDONED, 1.0)
    assert len(list(recent.newest_first())) == 1
    assert list(recent.errors.newest_first()) == []


def test_of_a_mark_made_twice_the_last_counts_and_failures_are_retries() -> None:
    timeline = Timeline("r", "/", 0.0)
    timeline.mark(RequestEvent.PREFILL_BEGAN, 1.0, "p1")
    timeline.mark(RequestEvent.PREFILL_FAILED, 2.0, "it is gone")
    timeline.mark(RequestEvent.PREFILL_BEGAN, 3.0, "p2")
    assert timeline.time_of(RequestEvent.PREFILL_BEGAN) == 3.0
    assert timeline.last_about(RequestEvent.PREFILL_BEGAN) == "p2"
    assert timeline.time_of(RequestEvent.FIRST_TOKEN) is None
    assert timeline.num_retries == 1


def test_marks_of_one_request_are_bounded() -> None:
    timeline = Timeline("r", "/", 0.0)
    for number in range(10 * MAX_MARKS):
        timeline.mark(RequestEvent.PREFILL_BEGAN, float(number))
    assert len(timeline.marks) == MAX_MARKS


def test_failed_requests_outlive_a_flood_of_good_ones() -> None:
    recent = RecentRequests(kept=8, kept_failures=2)
    recent.end(recent.begin("bad", "/", 0.0), RequestOutcome.FAILED, 502, 1.0, "P is gone")
    for number in range(100):
        recent.end(recent.begin(f"good{number}", "/", 2.0), RequestOutcome.ANSWERED, 200, 3.0)
    assert [one.request_id for one in recent.newest_first()] == [
        f"good{number}" for number in range(99, 91, -1)
    ]
    found = recent.find("bad")
    assert found is not None
    assert found.error == "P is gone"
    assert recent.find("good0") is None


def test_equal_errors_are_counted_so_that_a_flood_hides_no_other() -> None:
    recent = RecentRequests(kept_errors=3)
    recent.end(recent.begin("first", "/", 0.0), RequestOutcome.FAILED, 502, 1.0, "P is gone")
    for number in range(100):
        recent.end(
            recent.begin(f"r{number}", "/", 2.0),
            RequestOutcome.REFUSED,
            503,
            3.0 + number,
            "the queue is full",
        )
    tallies = list(recent.errors.newest_first())
    assert [(one.text, one.count, one.request_id) for one in tallies] == [
        ("the queue is full", 100, "r99"),
        ("P is gone", 1, "first"),
    ]
    assert (tallies[0].first_at, tallies[0].last_at) == (3.0, 102.0)
    for number in range(5):
        recent.errors.note(0, f"kind {number}", 200.0)
    assert [one.text for one in recent.errors.newest_first()] == ["kind 4", "kind 3", "kind 2"]


def test_a_clients_own_mistake_and_a_client_that_leaves_are_no_errors() -> None:
    recent = RecentRequests()
    recent.end(recent.begin("a", "/", 0.0), RequestOutcome.INVALID, 400, 1.0, "no prompt")
    recent.end(recent.begin("b", "/", 0.0), RequestOutcome.ABANDONED, 0, 1.0)
    assert list(recent.errors.newest_first()) == []
    assert list(recent.failed_newest_first()) == []


def test_of_requests_with_one_name_the_newest_is_found_and_a_live_one_before_all() -> None:
    recent = RecentRequests()
    old, new = recent.begin("same", "/", 0.0), recent.begin("same", "/", 1.0)
    assert recent.find("same") is new
    recent.end(new, RequestOutcome.ANSWERED, 200, 2.0)
    assert recent.find("same") is old
    recent.end(old, RequestOutcome.ANSWERED, 200, 3.0)
    assert recent.find("same") is old
    assert recent.find("other") is None


def test_long_errors_are_cut() -> None:
    recent = RecentRequests()
    recent.end(recent.begin("a", "/", 0.0), RequestOutcome.FAILED, 502, 1.0, "x" * 100_000)
    assert [len(one.text) for one in recent.errors.newest_first()] == [MAX_TEXT_CHARS]
    assert [len(one.error) for one in recent.newest_first()] == [MAX_TEXT_CHARS]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, *RequestOutcome])), max_size=200)
)
def test_whatever_happens_the_rings_stay_bounded_and_every_request_is_in_one_place(
    story: list[tuple[int, RequestOutcome | None]],
) -> None:
    recent = RecentRequests(kept=4, kept_failures=2, kept_errors=2)
    live: list[Timeline] = []
    for now, (name, outcome) in enumerate(story):
        if outcome is None or not live:
            live.append(recent.begin(f"r{name}", "/", now))
        else:
            recent.end(live.pop(name % len(live)), outcome, 500, now, f"error {name}")
    assert list(recent.live()) == live
    ended, failed = list(recent.newest_first()), list(recent.failed_newest_first())
    assert len(ended) <= 4
    assert len(failed) <= 2
    assert len(list(recent.errors.newest_first())) <= 2
    assert not set(live) & {*ended, *failed}
    assert all(one.outcome is not None and one.outcome.is_error for one in failed)
