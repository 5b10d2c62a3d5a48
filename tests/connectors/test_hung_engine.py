"""Tests what a decode engine that no longer steps costs its peers, while its transfer worker lives.
The engines run in real time, with short deadlines.
"""

import threading
from collections.abc import Iterator

import pytest
from tests.connectors.pair import DEADLINE_S, Blocks, EngineRequest, EngineSide, step_until

from kvferry.transports.memory import MemoryNetwork

TOKENS = list(range(100, 110))
LEASE_S = 1.5
NUM_PROBES = 5
"""The worker wakes a sleeping engine every second, so this takes longer than a step timeout of 3 s
and the rest of a lease.
"""


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def p(network: MemoryNetwork) -> Iterator[EngineSide]:
    p = EngineSide("p", network, kv_lease_duration=LEASE_S)
    yield p
    p.shutdown()


@pytest.fixture
def d(network: MemoryNetwork) -> Iterator[EngineSide]:
    d = EngineSide("d", network, step_timeout=3)
    yield d
    d.shutdown()


def arrive(p: EngineSide, d: EngineSide) -> EngineRequest:
    """A request waits in D's queue, and D's worker renews P's lease for it."""
    request = EngineRequest("r", TOKENS, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    d.scheduler.on_new_request(request)
    for side in (p, d):
        side.step()
    return request


def test_an_engine_that_hangs_holds_its_peers_blocks_for_one_more_lease(
    p: EngineSide, d: EngineSide
) -> None:
    request = arrive(p, d)
    step_until(lambda: "a" in p.seen.finished_sending, p)
    # The engine goes on, and its request follows the failure policy.
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in d.seen.failed_recving, p, d)


def test_an_engine_that_sleeps_until_it_is_woken_does_not_count_as_hung(
    p: EngineSide, d: EngineSide
) -> None:
    woken = threading.Event()
    d.worker.set_wakeup(woken.set)
    request = arrive(p, d)
    for _ in range(NUM_PROBES):
        assert woken.wait(DEADLINE_S)
        woken.clear()
        d.step()
        p.step()
    assert p.seen.finished_sending == set()
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
    assert d.seen.failed_recving == set()
