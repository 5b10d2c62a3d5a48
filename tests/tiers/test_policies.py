"""Tests of the eviction policies against slow models that follow their definitions literally."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.tiers.base import EntryKey
from kvferry.tiers.pool.policies import (
    POLICIES,
    ArcPolicy,
    EvictionPolicy,
    Insertion,
    IsPinned,
    LruPolicy,
)


def key(number: int) -> EntryKey:
    return EntryKey(number.to_bytes(32, "big"))


def nothing_is_pinned(key: EntryKey) -> bool:
    return False


@dataclass
class LruModel:
    capacity: int
    keys: list[EntryKey] = field(default_factory=list)

    def insert(self, key: EntryKey, is_pinned: IsPinned) -> Insertion:
        if key in self.keys:
            self.touch(key)
            return Insertion(True)
        if len(self.keys) < self.capacity:
            self.keys.append(key)
            return Insertion(True)
        for victim in self.keys:
            if not is_pinned(victim):
                self.keys.remove(victim)
                self.keys.append(key)
                return Insertion(True, victim)
        return Insertion(False)

    def touch(self, key: EntryKey) -> None:
        if key in self.keys:
            self.keys.remove(key)
            self.keys.append(key)

    def remove(self, key: EntryKey) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def held(self) -> set[EntryKey]:
        return {*self.keys}


@dataclass
class ArcModel:
    """ARC as in figure 4 of the paper, with lists whose first element is the LRU end. Two rules are
    added: a pinned key is skipped, first in its list and then for the other list; and `remove`
    leaves room that the next insertion takes without evicting.
    """

    c: int
    p: float = 0.0
    t1: list[EntryKey] = field(default_factory=list)
    t2: list[EntryKey] = field(default_factory=list)
    b1: list[EntryKey] = field(default_factory=list)
    b2: list[EntryKey] = field(default_factory=list)

    def insert(self, x: EntryKey, is_pinned: IsPinned) -> Insertion:
        if x in self.t1 or x in self.t2:  # case I
            self.touch(x)
            return Insertion(True)
        is_full = len(self.t1) + len(self.t2) == self.c
        if is_full and all(is_pinned(each) for each in self.t1 + self.t2):
            return Insertion(False)
        victim = None
        if x in self.b1:  # case II
            delta = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            if is_full:
                victim = self.replace(x, is_pinned)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            delta = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            if is_full:
                victim = self.replace(x, is_pinned)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    if is_full:
                        victim = self.replace(x, is_pinned)
                else:
                    victim = next(each for each in self.t1 if not is_pinned(each))
                    self.t1.remove(victim)
            else:
                total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
                if total == 2 * self.c:
                    self.b2.pop(0)
                if is_full:
                    victim = self.replace(x, is_pinned)
            self.t1.append(x)
        return Insertion(True, victim)

    def replace(self, x: EntryKey, is_pinned: IsPinned) -> EntryKey:
        from_t1 = len(self.t1) >= 1 and (
            (x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p
        )
        first = (self.t1, self.b1), (self.t2, self.b2)
        for keys, ghosts in first if from_t1 else first[::-1]:
            for victim in keys:
                if not is_pinned(victim):
                    keys.remove(victim)
                    ghosts.append(victim)
                    return victim
        raise AssertionError("the caller has found a key that is not pinned")

    def touch(self, x: EntryKey) -> None:
        for keys in (self.t1, self.t2):
            if x in keys:
                keys.remove(x)
                self.t2.append(x)
                return

    def remove(self, x: EntryKey) -> None:
        for keys in (self.t1, self.t2):
            if x in keys:
                keys.remove(x)

    def held(self) -> set[EntryKey]:
        return {*self.t1, *self.t2}


Operation = tuple[Literal["insert", "touch", "remove", "pin", "unpin"], int]
operations = st.lists(
    st.tuples(
        st.sampled_from(["insert", "insert", "insert", "touch", "remove", "pin", "unpin"]),
        st.integers(0, 11),
    ),
    max_size=150,
)


@pytest.mark.parametrize(("name", "model_type"), [("lru", LruModel), ("arc", ArcModel)])
@settings(max_examples=1000)
@example(  # t1 has the whole capacity, and a ghost of b2 returns
    capacity=1,
    steps=[("insert", 0), ("insert", 0), ("insert", 1), ("insert", 0), ("insert", 1)],
)
@given(capacity=st.integers(1, 5), steps=operations)
def test_a_policy_does_what_its_definition_says(
    name: str, model_type: type[LruModel | ArcModel], capacity: int, steps: Sequence[Operation]
) -> None:
    policy: EvictionPolicy = POLICIES[name](capacity)
    model = model_type(capacity)
    pinned = set[EntryKey]()
    for operation, number in steps:
        match operation:
            case "insert":
                assert policy.insert(key(number), pinned.__contains__) == model.insert(
                    key(number), pinned.__contains__
                )
            case "touch":
                policy.touch(key(number))
                model.touch(key(number))
            case "remove":
                policy.remove(key(number))
                model.remove(key(number))
            case "pin":
                pinned.add(key(number))
            case "unpin":
                pinned.discard(key(number))
        assert len(policy) == len(model.held()) <= capacity
        assert {key(n) for n in range(12) if key(n) in policy} == model.held()
        if isinstance(policy, ArcPolicy) and isinstance(model, ArcModel):
            assert policy.target == model.p
            assert len(model.t1) + len(model.b1) <= capacity
            assert sum(map(len, (model.t1, model.t2, model.b1, model.b2))) <= 2 * capacity


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_changes_if_all_keys_are_pinned(name: str) -> None:
    policy = POLICIES[name](2)
    for number in range(2):
        policy.insert(key(number), nothing_is_pinned)
    assert policy.insert(key(2), lambda key: True) == Insertion(False)
    assert key(2) not in policy
    assert policy.insert(key(2), lambda each: each == key(0)) == Insertion(True, key(1))


@pytest.mark.parametrize("name", POLICIES)
def test_after_clear_a_policy_is_as_new(name: str) -> None:
    policy = POLICIES[name](3)
    for number in [0, 1, 0, 2, 3, 1, 4, 5, 0]:
        policy.insert(key(number), nothing_is_pinned)
    policy.clear()
    new = POLICIES[name](3)
    assert len(policy) == 0
    for number in [0, 1, 0, 2, 3, 1, 4, 5, 0, 3, 3, 1]:
        assert policy.insert(key(number), nothing_is_pinned) == new.insert(
            key(number), nothing_is_pinned
        )


@pytest.mark.parametrize("name", POLICIES)
def test_a_pool_without_rows_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        POLICIES[name](0)


def num_hits(policy: EvictionPolicy, accesses: Sequence[int]) -> int:
    hits = 0
    for number in accesses:
        hits += key(number) in policy
        policy.insert(key(number), nothing_is_pinned)
    return hits


def test_arc_keeps_what_returns_through_scans_and_lru_does_not() -> None:
    # 60 keys are used again and again; between two rounds come 100 keys that never return.
    rounds = [[*range(1000 + 100 * n, 1100 + 100 * n), *range(60)] for n in range(50)]
    accesses = [*range(60), *range(60), *(number for each in rounds for number in each)]
    assert num_hits(LruPolicy(100), accesses) == 60
    assert num_hits(ArcPolicy(100), accesses) == 60 * 51


def test_arc_follows_a_load_that_changes() -> None:
    # First only the newest keys matter, then a fixed set does.
    recent = [number for n in range(2000) for number in (n, max(0, n - 90))]
    fixed = [10_000 + n % 95 for n in range(5000)]
    policy = ArcPolicy(100)
    assert num_hits(policy, recent) > 0.9 * 2000
    assert num_hits(policy, fixed) > 0.9 * 5000
