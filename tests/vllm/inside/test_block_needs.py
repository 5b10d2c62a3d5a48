"""Tests `Admissions`: how many blocks are missing for the request at which vLLM's scheduler
stopped; at least one if missing blocks may be the reason.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from vllm.v1.request import RequestStatus

from kvferry.vllm.engine.admissions import Admissions


@dataclass(eq=False)
class Waiting:
    """The attributes of a vLLM request that `Admissions` reads."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING


def test_a_request_that_got_its_blocks_lacks_none() -> None:
    needs = Admissions(block_size=32, num_groups=1)
    assert needs.missing_to_start(num_free=0) == 0
    needs.looked_up(Waiting("a", 100), 0, will_load=False)
    needs.admit(Waiting("a", 100), 0)
    assert needs.missing_to_start(num_free=0) == 0
    needs.looked_up(Waiting("b", 100), 0, will_load=True)
    needs.skip()
    assert needs.missing_to_start(num_free=0) == 0


def test_what_is_lacking_is_what_is_neither_cached_nor_free() -> None:
    needs = Admissions(block_size=32, num_groups=2, watermark=1)
    for free, lacking in ((0, 7), (4, 3), (6, 1), (10, 1), (11, 0)):
        needs.looked_up(Waiting("a", 100), 32, will_load=False)
        # The request needs 8 blocks, 2 of which are cached, and the watermark. The cached blocks
        # may be among the free ones; then this number of free blocks is not enough.
        assert needs.missing_to_start(free) == lacking
        # The demand is reported only once.
        assert needs.missing_to_start(free) == 0


def test_a_load_leaves_to_prefills_what_they_need() -> None:
    needs = Admissions(block_size=32, num_groups=1)
    needs.admit(Waiting("runs", 320, 64, RequestStatus.RUNNING), 0)
    for will_load, lacking in ((True, 4 + 8 - 1), (False, 4 - 1)):
        needs.looked_up(Waiting("a", 100), 0, will_load=will_load)
        assert needs.missing_to_start(num_free=1) == lacking
    needs.end("runs")
    needs.looked_up(Waiting("a", 100), 0, will_load=True)
    assert needs.missing_to_start(num_free=1) == 3


def test_one_whose_load_has_ended_is_found_although_nobody_asks_for_it() -> None:
    needs = Admissions(block_size=32, num_groups=1)
    loaded = Waiting("a", 200, 64, RequestStatus.WAITING_FOR_REMOTE_KVS)
    needs.looked_up(loaded, 0, will_load=True)
    needs.admit(loaded, 64)
    assert needs.missing_to_start(num_free=0) == 0
    needs.end_loads({"a"}, (), None)
    loaded.status = RequestStatus.WAITING
    assert needs.missing_to_start(num_free=0) == 5
    needs.admit(loaded, 0)
    assert needs.missing_to_start(num_free=0) == 0


def test_one_that_runs_lacks_at_least_one_block_and_at_most_what_a_step_took() -> None:
    needs = Admissions(block_size=32, num_groups=1)
    assert needs.missing_to_run(num_free=0) == 1
    needs.step_planned(SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 256}))
    assert needs.missing_to_run(num_free=3) == 5
    assert needs.missing_to_run(num_free=20) == 1
