"""Tests `NixlPushConnector` with the calls an engine makes: both legs start in either order, and
neither leaves any state behind.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.connectors.pair import Blocks, EngineRequest, EngineSide, step_until

from kvferry.connectors.contract import RequestStatus
from kvferry.protocol import messages as codec
from kvferry.protocol.messages import Release
from kvferry.protocol.tickets import PushTicket, PushTicketKey
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork

TOKENS = list(range(100, 110))
KEY = PushTicketKey(b"a secret of the cluster")
P_ID, D_ID = "cmpl-x-0-aaaaaaaa", "cmpl-x-0-dddddddd"


@dataclass
class Legs:
    """P, D, and the port of P's side channel that the router knows."""

    p: EngineSide
    d: EngineSide
    port: int
    levels: dict[str, Any] = field(default_factory=dict)
    router: MemoryControlTransport | None = None

    def release(self, ticket: str) -> None:
        """Tell P's side channel, as a router, that no D will come with this push ticket."""
        assert self.router is not None
        self.router.send(f"tcp://memory:{self.port}", codec.encode(Release(ticket)))

    def ticket(self, match_id: str = "h1", engine: str = "p", epoch: str = "epoch of p") -> str:
        return KEY.sign(PushTicket(match_id, engine, epoch, "memory", self.port, 1))

    def arrive(self, ticket: object, tokens: list[int] = TOKENS, name: str = D_ID) -> EngineRequest:
        request = EngineRequest(name, tokens, {"do_remote_prefill": True, "push_ticket": ticket})
        self.d.scheduler.on_new_request(request)
        return request

    def begin(self, ticket: object, tokens: list[int] = TOKENS, name: str = D_ID) -> EngineRequest:
        """Start the request on D with blocks 1, 2, 3."""
        request = self.arrive(ticket, tokens, name)
        assert self.d.scheduler.get_num_new_matched_tokens(request, 0) == (len(tokens), True)
        self.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), len(tokens))
        return request

    def compute(
        self, ticket: object, tokens: list[int] = TOKENS, name: str = P_ID
    ) -> dict[str, Any]:
        """Finish the prompt on P, computed into blocks 5, 6, 7."""
        self.p.fill([5, 6, 7], seed=1)
        return self.p.prefill(
            EngineRequest(name, tokens, {"do_remote_decode": True, "push_ticket": ticket}),
            [5, 6, 7],
        )

    def until(self, level: str, value: int) -> None:
        """Step both sides until the gauge `level` in P's metrics has this value."""

        def has_come() -> bool:
            stats = self.p.worker.get_kv_connector_stats()
            if stats is not None:
                self.levels.update(stats.data.get("levels", {}))
            return self.levels.get(level) == {"tp0": value}

        step_until(has_come, self.d, self.p)

    def registered(self) -> None:
        self.until("num_registrations", 1)

    def end(self) -> None:
        step_until(
            lambda: D_ID in self.d.seen.finished_recving and P_ID in self.p.seen.finished_sending,
            self.p,
            self.d,
        )

    def freed_p(self, name: str = P_ID) -> None:
        step_until(lambda: name in self.p.seen.finished_sending, self.p, self.d)

    def failure(self) -> str:
        """Return the error that D's client gets. Without a fence, the error may come long before D
        may use the blocks again.
        """
        seen = self.d.seen
        step_until(lambda: D_ID in seen.failed_recving or D_ID in seen.given_up_recving, self.d)
        return seen.failure_reasons.get(D_ID) or seen.given_up_recving[D_ID]

    def has_arrived(self, ours: list[int], theirs: list[int]) -> bool:
        """Whether P's blocks are in D's blocks, and all other blocks of D are empty."""
        others = [block for block in range(32) if block not in ours]
        return all(
            (array[ours] == self.p.memory[layer][theirs]).all() and not array[others].any()
            for layer, array in self.d.memory.items()
        )


def push_side(name: str, network: MemoryNetwork, **settings: Any) -> EngineSide:
    return EngineSide(name, network, connector="NixlPushConnector", **settings)


def legs_between(p: EngineSide, d: EngineSide) -> Legs:
    """Return the legs; like a router, learn P's side channel from P's first response."""
    params = p.prefill(EngineRequest("first", [1, 2, 3, 4]), [31])
    p.scheduler.request_abandoned("first")
    step_until(lambda: "first" in p.seen.finished_sending, p)
    assert params["remote_epoch"] == "epoch of p"
    return Legs(p, d, int(params["remote_port"]))


def closed(*sides: EngineSide) -> None:
    for side in sides:
        side.shutdown()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")
    ]


WAYS: dict[str, dict[str, Any]] = {
    "read": {},
    "written": {"supports_write_grants": True},
    "written without a fence": {"push_write": "always"},
}
"""The ways for bytes to get into D's blocks: D reads them, or P writes them with a write grant."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


@pytest.fixture
def legs(way: dict[str, Any]) -> Iterator[Legs]:
    network = MemoryNetwork()
    p, d = (push_side(name, network, kv_lease_duration=600, **way) for name in ("p", "d"))
    legs = legs_between(p, d)
    legs.router = MemoryControlTransport(network)
    yield legs
    legs.router.close()
    closed(p, d)


@pytest.fixture
def short(way: dict[str, Any]) -> Iterator[Legs]:
    """Two legs with leases and deadlines that are short enough for a test to wait for."""
    network = MemoryNetwork()
    p, d = (
        push_side(name, network, kv_lease_duration=2.0, push_registration_timeout=1.0, **way)
        for name in ("p", "d")
    )
    yield legs_between(p, d)
    closed(p, d)


def test_d_is_first_and_waits_for_p(legs: Legs) -> None:
    ticket = legs.ticket()
    legs.begin(ticket)
    legs.registered()
    assert legs.d.seen.finished_recving == set()
    legs.compute(ticket)
    legs.end()
    assert legs.d.seen.failed_recving == set()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


def test_p_is_first_and_waits_for_d(legs: Legs) -> None:
    ticket = legs.ticket()
    legs.compute(ticket)
    legs.until("num_leases", 1)
    assert P_ID not in legs.p.seen.finished_sending
    legs.begin(ticket)
    legs.end()
    assert legs.d.seen.failed_recving == set()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


@pytest.mark.parametrize("is_p_first", [True, False])
def test_a_router_that_ends_the_decode_leg_before_d_registers_frees_p(
    legs: Legs, is_p_first: bool
) -> None:
    """A ticket of another incarnation of P, or a forged one, frees nothing."""
    ticket, num_taken = legs.ticket(), 0

    def count() -> None:
        nonlocal num_taken
        num_taken += 1

    legs.p.scheduler.set_wakeup(count)
    if is_p_first:
        legs.compute(ticket)
        legs.until("num_leases", 1)
    for other in ("forged", legs.ticket(epoch="another epoch"), legs.ticket("h2")):
        legs.release(other)
    step_until(lambda: num_taken == 1, legs.p)
    assert P_ID not in legs.p.seen.finished_sending
    legs.release(ticket)
    step_until(lambda: num_taken == 2, legs.p)
    legs.p.step()
    if not is_p_first:
        legs.compute(ticket)
    legs.freed_p()


def test_only_what_d_lacks_is_moved(legs: Legs) -> None:
    ticket = legs.ticket()
    request = legs.arrive(ticket)
    assert legs.d.scheduler.get_num_new_matched_tokens(request, 4) == (6, True)
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 6)
    legs.compute(ticket)
    legs.end()
    assert legs.has_arrived([2, 3], [6, 7])


def test_d_registers_before_it_has_blocks(legs: Legs) -> None:
    ticket = legs.ticket()
    request = legs.arrive(ticket)
    legs.registered()
    legs.compute(ticket)
    legs.until("num_registrations", 0)
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    legs.end()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


@pytest.mark.parametrize("is_p_first", [True, False])
def test_a_full_local_hit_frees_p_without_a_lease(legs: Legs, is_p_first: bool) -> None:
    ticket = legs.ticket()
    if is_p_first:
        legs.compute(ticket)
        legs.until("num_leases", 1)
    request = legs.arrive(ticket)
    if not is_p_first:
        legs.registered()
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 0)
    if not is_p_first:
        legs.compute(ticket)
    legs.freed_p()
    assert legs.has_arrived([], [])


@pytest.mark.parametrize("is_p_first", [True, False])
@pytest.mark.parametrize("has_blocks", [True, False])
def test_d_aborts_and_both_sides_are_free_without_a_lease(
    legs: Legs, is_p_first: bool, has_blocks: bool
) -> None:
    ticket = legs.ticket()
    if is_p_first:
        legs.compute(ticket)
        legs.p.step()
    request = legs.begin(ticket) if has_blocks else legs.arrive(ticket)
    if not is_p_first:
        legs.registered()
    request.status = RequestStatus.FINISHED_ABORTED
    assert legs.d.scheduler.request_finished(request, [1, 2, 3] if has_blocks else []) == (
        False,
        None,
    )
    if has_blocks:
        step_until(lambda: D_ID in legs.d.seen.finished_recving, legs.d, legs.p)
    if not is_p_first:
        legs.compute(ticket)
    legs.freed_p()


def test_a_prefill_that_ends_without_blocks_fails_d_with_the_reason(legs: Legs) -> None:
    ticket = legs.ticket()
    legs.begin(ticket)
    legs.registered()
    request = EngineRequest(
        P_ID,
        TOKENS,
        {"do_remote_decode": True, "push_ticket": ticket},
        RequestStatus.FINISHED_ABORTED,
    )
    assert legs.p.scheduler.request_finished_all_groups(request, ([5, 6, 7],)) == (False, None)
    legs.p.step()
    assert "the prefill leg ended as finished_aborted" in legs.failure()


@pytest.fixture
def hasty(way: dict[str, Any]) -> Iterator[Legs]:
    """P soon stops waiting for a prefill leg."""
    network = MemoryNetwork()
    p, d = (push_side(name, network, leg_wait=1.0, **way) for name in ("p", "d"))
    yield legs_between(p, d)
    closed(p, d)


def test_a_prefill_leg_that_never_arrives_fails_d_long_before_its_own_deadline(hasty: Legs) -> None:
    hasty.begin(hasty.ticket())
    assert "no prefill leg for this request arrived within 1 s" in hasty.failure()


def test_a_prefill_leg_in_ps_queue_is_waited_for(hasty: Legs) -> None:
    ticket = hasty.ticket()
    leg = EngineRequest(P_ID, TOKENS, {"do_remote_decode": True, "push_ticket": ticket})
    hasty.p.scheduler.on_new_request(leg)
    hasty.begin(ticket)
    # A second request, whose leg never arrives, shows that the time has passed.
    other = hasty.arrive(hasty.ticket("h2"), name="other")
    hasty.d.scheduler.update_state_after_alloc(other, Blocks(([8, 9, 10],)), len(TOKENS))
    step_until(
        lambda: "other" in hasty.d.seen.failed_recving | hasty.d.seen.given_up_recving.keys(),
        hasty.p,
        hasty.d,
    )
    hasty.compute(ticket)
    hasty.end()
    assert D_ID not in hasty.d.seen.failed_recving


def test_the_kv_of_another_prompt_is_refused_and_p_is_freed(legs: Legs) -> None:
    ticket = legs.ticket()
    legs.begin(ticket)
    legs.compute(ticket, [*TOKENS[:9], 7])
    legs.freed_p()
    assert "8 tokens are known to be the same, but 10 are needed" in legs.failure()
    assert legs.has_arrived([], [])


def test_a_prefill_that_came_alone_is_not_for_whoever_has_the_same_id(legs: Legs) -> None:
    ticket = legs.ticket()
    legs.compute(None, name="cmpl-x-0-bbbbbbbb")
    legs.begin(ticket)
    legs.registered()
    legs.compute(ticket)
    legs.end()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])
    assert "cmpl-x-0-bbbbbbbb" not in legs.p.seen.finished_sending


def test_params_of_a_router_that_asked_p_first_are_served_as_in_pull(legs: Legs) -> None:
    params = legs.compute(None)
    # If it were push, vllm-router would drop the ticket.
    assert params["transfer_mode"] == "pull"
    request = EngineRequest(D_ID, TOKENS, params)
    legs.d.scheduler.on_new_request(request)
    assert legs.d.scheduler.get_num_new_matched_tokens(request, 0) == (10, True)
    legs.d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    legs.end()
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])


@pytest.mark.parametrize(
    "ticket", ["forged", 7, "", KEY.sign(PushTicket("h", "p", "e", "memory", 1, 1))[:-8]]
)
def test_a_push_ticket_that_is_not_genuine_gets_the_failure_policy(
    legs: Legs, ticket: object
) -> None:
    legs.begin(ticket)
    assert "ticket" in legs.failure()


def test_one_engine_for_both_legs_dials_nobody_and_keeps_nothing(legs: Legs) -> None:
    for match_id, is_p_first in (("h1", True), ("h2", False)):
        ticket = legs.ticket(match_id, engine="p")
        request = EngineRequest(
            f"d of {match_id}", TOKENS, {"do_remote_prefill": True, "push_ticket": ticket}
        )
        if is_p_first:
            legs.compute(ticket, name=f"p of {match_id}")
        legs.p.scheduler.on_new_request(request)
        assert legs.p.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        if not is_p_first:
            legs.compute(ticket, name=f"p of {match_id}")
        legs.freed_p(f"p of {match_id}")


def test_a_restarted_p_fails_d_at_once(legs: Legs) -> None:
    legs.begin(legs.ticket(epoch="an earlier incarnation"))
    step_until(lambda: D_ID in legs.d.seen.failed_recving, legs.d, legs.p)
    assert "restarted" in legs.failure()


def test_a_p_that_dies_while_d_waits_fails_d(legs: Legs) -> None:
    legs.begin(legs.ticket())
    legs.registered()
    legs.p.shutdown()
    assert "lost" in legs.failure()


def test_a_p_that_never_comes_fails_d_by_its_deadline(short: Legs) -> None:
    short.begin(short.ticket())
    assert short.failure() == "the prefill engine offered no blocks within 1 s"


def test_a_d_that_never_comes_leaves_p_to_its_lease_and_is_told_when_it_does(short: Legs) -> None:
    ticket = short.ticket()
    short.compute(ticket)
    short.freed_p()
    short.begin(ticket)
    assert "the prefill's lease expired before the reader arrived" in short.failure()


def test_a_d_that_dies_after_it_registered_leaves_nothing_behind(short: Legs) -> None:
    ticket = short.ticket()
    short.begin(ticket)
    short.registered()
    short.d.shutdown()
    short.compute(ticket)
    step_until(lambda: P_ID in short.p.seen.finished_sending, short.p)


@pytest.mark.parametrize(
    ("of_p", "of_d"),
    [("NixlPushConnector", "NixlConnector"), ("NixlConnector", "NixlPushConnector")],
)
def test_one_that_pushes_and_one_that_pulls_meet_by_the_prefill_sides_ticket(
    of_p: str, of_d: str
) -> None:
    network = MemoryNetwork()
    p, d = EngineSide("p", network, connector=of_p), EngineSide("d", network, connector=of_d)
    p.fill([5, 6, 7], seed=1)
    request = EngineRequest("r", TOKENS, p.prefill(EngineRequest("a", TOKENS), [5, 6, 7]))
    d.scheduler.on_new_request(request)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in d.seen.finished_recving and "a" in p.seen.finished_sending, p, d)
    assert d.seen.failed_recving == set()
    assert Legs(p, d, 0).has_arrived([1, 2, 3], [5, 6, 7])
    closed(p, d)


def test_one_that_pulls_says_so_when_it_is_given_a_push_ticket() -> None:
    network = MemoryNetwork()
    d = EngineSide("d", network)
    request = EngineRequest("r", TOKENS, {"do_remote_prefill": True, "push_ticket": "any"})
    d.scheduler.on_new_request(request)
    d.scheduler.update_state_after_alloc(request, Blocks(([1, 2, 3],)), 10)
    step_until(lambda: "r" in d.seen.failed_recving, d)
    assert "use NixlPushConnector on this engine" in d.seen.failure_reasons["r"]
    closed(d)


def test_the_choices_of_one_client_share_a_prefill(legs: Legs) -> None:
    ticket = legs.ticket()
    first, second = legs.begin(ticket), legs.arrive(ticket, name="cmpl-x-1-dddddddd")
    assert legs.d.scheduler.get_num_new_matched_tokens(second, 0) == (None, False)
    legs.until("num_registrations", 2)
    legs.compute(ticket)
    step_until(lambda: D_ID in legs.d.seen.finished_recving, legs.p, legs.d)
    assert legs.has_arrived([1, 2, 3], [5, 6, 7])
    assert P_ID not in legs.p.seen.finished_sending
    assert legs.d.scheduler.get_num_new_matched_tokens(second, 8) == (0, False)
    legs.d.scheduler.update_state_after_alloc(second, Blocks(([1, 2, 4],)), 0)
    legs.end()
    assert first.request_id == D_ID
