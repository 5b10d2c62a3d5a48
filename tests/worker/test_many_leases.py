"""Tests that a tick of a transfer worker and a step of an engine cost the same with ten live leases
as with thousands.
"""

import pytest
from tests.connectors.pair import EngineRequest, EngineSide, step_until
from tests.operations import count_instructions
from tests.worker.world import Side

from kvferry.testing.local import ManualClock
from kvferry.transports.memory import MemoryNetwork

FEW, MANY = 10, 1_000


class LeasedPair:
    """P holds `count` leases, and D waits for blocks for as many requests."""

    def __init__(self, count: int) -> None:
        self.clock, network = ManualClock(), MemoryNetwork()
        self.p, self.d = Side("p", "e1", network, self.clock), Side("d", "f1", network, self.clock)
        for number in range(count):
            ticket = self.p.issue(f"r{number}", [number % 32])
            self.p.grant(f"r{number}")
            self.d.track(f"d{number}", ticket)
        self.run()

    def run(self) -> None:
        for _ in range(10):
            self.p.step()
            self.d.step()

    def turn_of(self, side: Side) -> int:
        """Return the number of instructions of a tick in which nothing is due."""

        def turn() -> None:
            side.transfer_worker.idle_s()
            side.step()

        return count_instructions(turn)

    def close(self) -> None:
        self.p.close()
        self.d.close()


@pytest.mark.parametrize("whose", ["p", "d"])
def test_a_turn_of_the_ferry_is_the_same_work_for_few_and_for_many(whose: str) -> None:
    few, many = LeasedPair(FEW), LeasedPair(MANY)
    assert [pair.p.transfer_worker.snapshot().leases for pair in (few, many)] == [FEW, MANY]
    assert [pair.d.transfer_worker.snapshot().transfers for pair in (few, many)] == [FEW, MANY]
    assert few.turn_of(getattr(few, whose)) == many.turn_of(getattr(many, whose))
    for pair in (few, many):
        pair.clock.advance(6)
        pair.d.step()
    assert many.turn_of(many.p) > 5 * few.turn_of(few.p), (
        "a beat that renews them all is work, and is counted"
    )
    few.close()
    many.close()


def test_beats_keep_many_leases_alive_and_silence_ends_them_all() -> None:
    pair = LeasedPair(MANY)
    for _ in range(20):
        pair.clock.advance(5)
        pair.run()
    assert pair.p.transfer_worker.snapshot().leases == MANY
    pair.clock.advance(31)
    pair.p.step()
    assert len(pair.p.freed()) == MANY
    pair.close()


def leases_of(side: EngineSide) -> int:
    """Return the number of leases that the gauge has reported since the last step."""
    stats = side.worker.get_kv_connector_stats()
    levels = {} if stats is None else stats.to_dict().get("levels", {})
    return sum(levels.get("num_leases", {}).values())


def leased_side(network: MemoryNetwork, count: int) -> EngineSide:
    side = EngineSide(f"p{count}", network)
    for number in range(count):
        side.prefill(EngineRequest(f"r{number}", list(range(10, 18))), [0, 1])
    step_until(lambda: leases_of(side) == count, side)
    return side


def test_a_step_of_the_engine_is_the_same_work_for_few_and_for_many() -> None:
    network = MemoryNetwork()
    few, many = (leased_side(network, count) for count in (FEW, MANY))
    costs = [min(count_instructions(side.step) for _ in range(5)) for side in (few, many)]
    assert costs[0] == costs[1]
    many.prefill(EngineRequest("one more", list(range(10, 18))), [0, 1])
    assert count_instructions(many.step) > costs[1], "a command is work, and is counted"
    few.shutdown()
    many.shutdown()
