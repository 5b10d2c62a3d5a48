"""Tests that a transfer has ended only when every rank has reported its end, for any order and any
repetition of the reports.
"""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import KVConnectorOutput
from kvferry.connectors.nixl.metadata import NixlWorkerMetadata
from kvferry.connectors.offloading.metadata import OffloadingWorkerMetadata
from kvferry.connectors.stats import TransferStats


def test_an_id_is_finished_when_the_last_rank_reports_it() -> None:
    ranks, sent = KVOutputAggregator(2), KVConnectorOutput(finished_sending={"a"})
    assert (ranks.aggregate([sent, None]).finished_sending, ranks.num_partial) == (set(), 1)
    assert (ranks.aggregate([None, sent]).finished_sending, ranks.num_partial) == ({"a"}, 0)


def test_a_rank_that_reports_twice_does_not_stand_in_for_another() -> None:
    ranks, received = KVOutputAggregator(2), KVConnectorOutput(finished_recving={"a"})
    for _ in range(3):
        assert ranks.aggregate([received, None]).finished_recving == set()


def test_one_failed_rank_fails_the_whole_and_is_reported_with_the_last() -> None:
    ranks, received = KVOutputAggregator(2), KVConnectorOutput(finished_recving={"a"})
    failed = KVConnectorOutput(
        finished_recving={"a"}, failed_recving={"a"}, failure_reasons={"a": "lost"}
    )
    assert ranks.aggregate([failed, None]).failed_recving == set()
    whole = ranks.aggregate([None, received])
    assert whole.finished_recving == whole.failed_recving == {"a"}
    assert whole.failure_reasons == {"a": "lost"}
    assert ranks.aggregate([received, received]).failed_recving == set()


def test_what_one_rank_gives_up_is_told_before_the_others_have_ended() -> None:
    ranks = KVOutputAggregator(2)
    whole = ranks.aggregate([None, KVConnectorOutput(given_up_recving={"a": "slow"})])
    assert (whole.given_up_recving, whole.finished_recving) == ({"a": "slow"}, set())


def test_reports_that_never_become_whole_are_bounded() -> None:
    ranks = KVOutputAggregator(2, max_partial=10)
    for request in map(str, range(1000)):
        failed = KVConnectorOutput(finished_recving={request}, failed_recving={request})
        ranks.aggregate([failed, None])
    assert ranks.num_partial == 10


def test_stats_add_up_over_ranks() -> None:
    def output() -> KVConnectorOutput:
        stats = TransferStats()
        stats.record_transfer("shm", 100, 2, 2, 0.001, 0.5)
        stats.count("failed_loads")
        return KVConnectorOutput(kv_connector_stats=stats, invalid_block_ids={1})

    whole = KVOutputAggregator(2).aggregate([output(), output()])
    assert whole.kv_connector_stats is not None
    data = whole.kv_connector_stats.to_dict()
    assert data["transports"] == {
        "shm": {"transfers": 2, "bytes": 200, "seconds": 1.0, "segments": 4, "planned": 4}
    }
    assert data["failed_loads"] == 2
    assert data["samples"]["bytes_transferred"] == [100, 100]
    assert whole.kv_connector_stats.reduce()["Num successful transfers"] == 2
    assert whole.kv_connector_stats.reduce()["P90 xfer time (ms)"] == 500
    assert whole.invalid_block_ids == {1}


@given(st.permutations([(rank, name) for rank in range(3) for name in "ab"]))
def test_the_order_of_reports_does_not_matter(reports: list[tuple[int, str]]) -> None:
    ranks = KVOutputAggregator(3)
    finished: list[str] = []
    for rank, name in reports:
        outputs: list[KVConnectorOutput | None] = [None, None, None]
        outputs[rank] = KVConnectorOutput(finished_sending={name})
        finished += ranks.aggregate(outputs).finished_sending
    assert sorted(finished) == ["a", "b"]
    assert finished[-1] == reports[-1][1]


def test_the_later_of_two_reports_of_one_rank_counts() -> None:
    """vLLM passes on the report of a step that has failed with that of the next step."""
    earlier = OffloadingWorkerMetadata(copied={0: 3}, timed_step=7, busy={0: True})
    later = OffloadingWorkerMetadata(copied={0: 4}, timed_step=8, busy={0: False})
    other_rank = OffloadingWorkerMetadata(copied={1: 4}, timed_step=8, busy={1: True})
    whole = earlier.aggregate(later).aggregate(other_rank)
    assert (whole.copied, whole.timed_step) == ({0: 4, 1: 4}, 8)
    assert whole.busy == {0: False, 1: True}


def test_what_one_rank_reports_in_two_steps_is_added_up() -> None:
    earlier = NixlWorkerMetadata(Counter("a"), {"r": "full"}, {"t"}, {"f": "lost"})
    whole = earlier.aggregate(NixlWorkerMetadata(Counter("b"))).aggregate(
        NixlWorkerMetadata(Counter("ab"))
    )
    assert whole.reserved == {"a": 2, "b": 2}
    assert (whole.refused, whole.being_read) == ({"r": "full"}, {"t"})
    assert whole.failed == {"f": "lost"}
