"""Tests the store of conversation tickets against a simple model, and the bounds of the store."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.router.fleet_world import make_instance

from kvferry.errors import ConfigError
from kvferry.router.conversations.store import Conversations, LastTurn
from kvferry.router.fleet.instances import Instance, Role

D1, D2 = make_instance(1, Role.DECODE), make_instance(2, Role.DECODE)
P = make_instance(3)

TENANTS = st.sampled_from(["ann", "bob", ""])
NAMES = st.sampled_from(["x", "y", "z", "ann", ""])


def turn(text: bytes = b"{}", decoder: Instance = D1) -> LastTurn:
    return LastTurn(text, decoder, P)


def test_a_ticket_is_used_once() -> None:
    store = Conversations()
    assert store.put("ann", "x", turn(), ttl_s=60, now=0)
    assert store.take("ann", "x", now=1) == turn()
    assert store.take("ann", "x", now=1) is None
    assert (len(store), store.num_bytes) == (0, 0)


@given(one=st.tuples(st.text(), st.text()), other=st.tuples(st.text(), st.text()))
def test_another_tenants_conversation_is_never_found(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """This also holds where tenant and conversation name, concatenated, give the same text."""
    store = Conversations()
    store.put(*one, turn(), ttl_s=60, now=0)
    assert (store.take(*other, now=1) is not None) == (one == other)


def test_a_ticket_is_not_used_in_its_last_moments() -> None:
    store = Conversations(margin_s=2)
    for name in ("early", "late"):
        store.put("ann", name, turn(), ttl_s=10, now=100)
    assert store.take("ann", "early", now=107.9) is not None
    assert store.take("ann", "late", now=108) is None
    assert len(store) == 0


@pytest.mark.parametrize("ttl_s", [2.0, 0.0, -5.0, float("nan")])
def test_a_ticket_that_is_over_soon_is_not_kept_and_replaces_what_there_was(ttl_s: float) -> None:
    store = Conversations(margin_s=2)
    store.put("ann", "x", turn(b"old"), ttl_s=60, now=0)
    assert not store.put("ann", "x", turn(b"new"), ttl_s=ttl_s, now=1)
    assert store.take("ann", "x", now=1) is None


def test_tickets_die_with_the_decoder_that_issued_them() -> None:
    store = Conversations()
    store.put("ann", "x", turn(decoder=D1), ttl_s=60, now=0)
    store.put("ann", "y", turn(decoder=D2), ttl_s=60, now=0)
    assert store.forget(P) == 0
    assert store.forget(make_instance(1, Role.DECODE)) == 1
    assert store.take("ann", "x", now=1) is None
    assert store.take("ann", "y", now=1) is not None


def test_the_oldest_make_room() -> None:
    store = Conversations(max_count=2)
    for name in ("a", "b"):
        store.put("ann", name, turn(), ttl_s=60, now=0)
    store.put("ann", "a", turn(b"again"), ttl_s=60, now=1)
    store.put("ann", "c", turn(), ttl_s=60, now=2)
    assert [name for name in "abc" if store.take("ann", name, now=3)] == ["a", "c"]


def test_a_ticket_larger_than_all_room_pushes_nobody_out() -> None:
    store = Conversations(max_bytes=2000)
    store.put("ann", "x", turn(), ttl_s=60, now=0)
    assert not store.put("ann", "y", turn(bytes(3000)), ttl_s=60, now=0)
    assert store.take("ann", "x", now=1) is not None


def test_a_store_without_room_keeps_nothing() -> None:
    store = Conversations(max_count=0)
    assert not store.put("ann", "x", turn(), ttl_s=60, now=0)


def test_negative_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        Conversations(max_count=-1)


@dataclass(frozen=True)
class Kept:
    turn: LastTurn
    until: float


class ConversationMachine(RuleBasedStateMachine):
    """The model keeps every turn: the store returns only turns that the model has, and lacks only
    turns that exceeded a bound or were too old.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = Conversations(max_count=4, max_bytes=4000, margin_s=2)
        self.model: dict[tuple[str, str], Kept] = {}
        self.newest: tuple[str, str] | None = None

    @rule(
        tenant=TENANTS,
        name=NAMES,
        size=st.integers(0, 2500),
        ttl_s=st.integers(0, 30),
        decoder=st.sampled_from([D1, D2]),
    )
    def put(self, tenant: str, name: str, size: int, ttl_s: int, decoder: Instance) -> None:
        added = LastTurn(bytes(size), decoder)
        self.model.pop((tenant, name), None)
        if self.store.put(tenant, name, added, ttl_s, self.now):
            self.model[tenant, name] = Kept(added, self.now + ttl_s - 2)
            self.newest = (tenant, name)
        else:
            assert ttl_s <= 2

    @rule(tenant=TENANTS, name=NAMES)
    def take(self, tenant: str, name: str) -> None:
        kept, found = self.model.pop((tenant, name), None), self.store.take(tenant, name, self.now)
        if found is not None:
            assert kept is not None
            assert found is kept.turn
            assert self.now < kept.until

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(decoder=st.sampled_from([D1, D2]))
    def forget(self, decoder: Instance) -> None:
        self.store.forget(decoder)
        self.model = {key: kept for key, kept in self.model.items() if kept.turn.decoder != decoder}

    @precondition(lambda self: self.newest in self.model)
    @rule()
    def the_newest_is_always_kept(self) -> None:
        assert self.newest is not None
        kept = self.model.pop(self.newest)
        assert (self.store.take(*self.newest, self.now) is kept.turn) == (self.now < kept.until)

    @rule()
    def expire(self) -> None:
        self.store.expire(self.now)
        self.model = {key: kept for key, kept in self.model.items() if self.now < kept.until}
        assert len(self.store) <= len(self.model)

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.store) <= 4
        assert 0 <= self.store.num_bytes <= 4000
        assert (len(self.store) == 0) == (self.store.num_bytes == 0)


TestConversationMachine = ConversationMachine.TestCase
