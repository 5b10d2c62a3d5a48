"""Tests the KV events of the tiers: a reader that applies them knows what all ranks hold."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.connectors.event_reader import Reader
from tests.connectors.offloading_side import FULL, TOKENS, WINDOW, Start, known, objects
from tests.connectors.pair import EngineRequest, Slice

from kvferry.connectors.contract import Request
from kvferry.connectors.offloading.events import (
    BlocksRemoved,
    BlocksStored,
    HashedBlocks,
    KVEventLog,
)
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import ContentsChanged
from kvferry.tiers.jobs.contents import TierContents
from kvferry.tiers.keys import KeyChain

CHUNK_TOKENS = 4
TIERS = ("cpu", "disk")


def describe(request: Request, tokens: range) -> HashedBlocks:
    """The hash of a block is the tuple of all tokens up to its end."""
    ids = tuple(request.all_token_ids)
    first, middle, end = tokens.start, tokens.start + CHUNK_TOKENS // 2, tokens.stop
    return HashedBlocks((ids[:middle], ids[:end]), ids[:first] or None, ids[first:end])


@dataclass
class Prompt:
    """A prompt of three chunks and their keys in two KV-cache groups."""

    token_ids: list[int]

    def __post_init__(self) -> None:
        self.request = EngineRequest("a", self.token_ids)
        chain = KeyChain(CHUNK_TOKENS, "", num_groups=2)
        chain.extend(self.token_ids, len(self.token_ids))
        self.keys = chain.keys

    def blocks(self, index: int) -> HashedBlocks:
        return describe(self.request, range(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS))


ONE = Prompt(list(range(12)))
OTHER = Prompt([0, 1, 2, 3, 4, 5, *range(20, 26)])
"""Has the first chunk of `ONE`, and the first block of its second chunk."""


def stored(tier: str, *keys: EntryKey) -> ContentsChanged:
    return ContentsChanged(stored={tier: keys})


def removed(tier: str, *keys: EntryKey) -> ContentsChanged:
    return ContentsChanged(removed={tier: keys})


def new_log(num_ranks: int = 1, **more: Any) -> KVEventLog:
    log = KVEventLog(num_ranks, CHUNK_TOKENS, describe, **more)
    log.note_request(ONE.request, ONE.keys, range(3))
    return log


def test_a_chunk_is_stored_when_all_ranks_have_it_and_removed_when_the_first_has_not() -> None:
    log, key = new_log(num_ranks=2), ONE.keys[0][0]
    log.note_report(0, stored("cpu", key))
    assert log.take_events() == []
    log.note_report(1, stored("cpu", key))
    assert log.take_events() == [BlocksStored("cpu", 0, ONE.blocks(0))]
    log.note_report(1, removed("cpu", key))
    assert log.take_events() == [BlocksRemoved("cpu", 0, ONE.blocks(0))]
    log.note_report(0, removed("cpu", key))
    assert log.take_events() == []


def test_chunks_that_are_stored_from_the_end_are_announced_from_the_start() -> None:
    log = new_log()
    log.note_report(0, stored("cpu", *reversed(ONE.keys[0])))
    assert log.take_events() == [BlocksStored("cpu", 0, ONE.blocks(n)) for n in range(3)]


def test_a_chunk_waits_until_some_tier_has_the_chunk_before_it() -> None:
    log, (first, second, _) = new_log(), ONE.keys[0]
    log.note_report(0, stored("disk", second))
    assert log.take_events() == []
    log.note_report(0, stored("cpu", first))
    assert log.take_events() == [
        BlocksStored("cpu", 0, ONE.blocks(0)),
        BlocksStored("disk", 0, ONE.blocks(1)),
    ]


def test_a_chunk_that_was_lost_while_it_waited_is_not_announced() -> None:
    log, (first, second, _) = new_log(), ONE.keys[0]
    log.note_report(0, stored("disk", second))
    log.note_report(0, removed("disk", second))
    log.note_report(0, stored("cpu", first))
    assert log.take_events() == [BlocksStored("cpu", 0, ONE.blocks(0))]


def test_a_block_that_two_chunks_have_is_stored_once_and_removed_with_the_last() -> None:
    log = new_log()
    log.note_request(OTHER.request, OTHER.keys, range(3))
    log.note_report(0, stored("cpu", *ONE.keys[0][:2]))
    log.take_events()
    log.note_report(0, stored("cpu", OTHER.keys[0][1]))
    shared, second = OTHER.blocks(1).hashes
    own = HashedBlocks((second,), shared, (20, 21))
    assert log.take_events() == [BlocksStored("cpu", 0, own)]
    log.note_report(0, removed("cpu", OTHER.keys[0][1]))
    assert log.take_events() == [BlocksRemoved("cpu", 0, own)]
    log.note_report(0, stored("cpu", OTHER.keys[0][1]))
    log.note_report(0, removed("cpu", ONE.keys[0][1]))
    log.take_events()
    log.note_report(0, removed("cpu", OTHER.keys[0][1]))
    assert log.take_events() == [BlocksRemoved("cpu", 0, OTHER.blocks(1))]


def test_a_window_groups_chunk_needs_only_another_groups_chunk_before_it() -> None:
    log = new_log()
    log.note_report(0, stored("cpu", ONE.keys[0][0], ONE.keys[1][1]))
    assert log.take_events() == [
        BlocksStored("cpu", 0, ONE.blocks(0)),
        BlocksStored("cpu", 1, ONE.blocks(1)),
    ]


def test_after_a_reset_everything_is_removed_and_late_reports_are_ignored() -> None:
    log, reader = new_log(), Reader()
    log.note_report(0, stored("cpu", *ONE.keys[0]))
    log.note_report(0, stored("disk", ONE.keys[0][0]))
    reader.apply(log.take_events())
    assert len(reader.known) == 8
    log.clear()
    log.note_report(0, stored("disk", ONE.keys[0][1]))
    reader.apply(log.take_events())
    assert not reader.known
    assert len(log) == 0


def test_after_a_reset_a_chunk_waits_for_its_parent_again() -> None:
    log, (first, second, third) = new_log(), ONE.keys[0]
    log.note_report(0, stored("cpu", first, third))
    log.clear()
    log.take_events()
    log.note_request(ONE.request, ONE.keys, range(3))
    log.note_report(0, stored("cpu", second))
    assert log.take_events() == []
    log.note_report(0, stored("cpu", first))
    assert log.take_events() == [BlocksStored("cpu", 0, ONE.blocks(n)) for n in range(2)]


def test_a_rank_that_has_lost_everything_removes_its_chunks_from_all_tiers() -> None:
    log, reader = new_log(), Reader()
    log.note_report(0, stored("cpu", *ONE.keys[0]))
    log.note_report(0, stored("disk", ONE.keys[0][0]))
    log.note_report(0, ContentsChanged(stored("disk", ONE.keys[0][0]).stored, is_cleared=True))
    reader.apply(log.take_events())
    assert reader.known == {("disk", 0, each) for each in ONE.blocks(0).hashes}


def test_chunks_that_no_tier_holds_are_forgotten_when_they_are_too_many() -> None:
    log = new_log(max_unheld=4)
    log.note_report(0, stored("cpu", ONE.keys[0][2]))
    log.note_request(OTHER.request, OTHER.keys, range(3))
    assert len(log) == 5
    log.note_report(0, ContentsChanged(is_cleared=True))
    assert len(log) == 4


@pytest.mark.parametrize("num_described", [0, 1])
def test_a_chunk_that_the_engine_cannot_describe_is_not_announced(num_described: int) -> None:
    def describe_some(request: Request, tokens: range) -> HashedBlocks | None:
        return describe(request, tokens) if tokens.start < num_described * CHUNK_TOKENS else None

    log = KVEventLog(1, CHUNK_TOKENS, describe_some)
    log.note_request(ONE.request, ONE.keys, range(3))
    log.note_report(0, stored("cpu", *ONE.keys[0]))
    assert len(log.take_events()) == num_described


class Engine:
    """Two ranks, whose reports are under way for a while, and a reader of the events."""

    def __init__(self) -> None:
        self.log = KVEventLog(2, CHUNK_TOKENS, describe)
        self.reader = Reader()
        self.contents = [TierContents(), TierContents()]
        self.held: list[set[tuple[str, EntryKey]]] = [set(), set()]
        self.sent: list[deque[ContentsChanged]] = [deque(), deque()]
        self.has_reset = [True, True]
        self.described: dict[EntryKey, tuple[int, HashedBlocks]] = {}

    def offer(self, prompt: Prompt) -> None:
        self.log.note_request(prompt.request, prompt.keys, range(3))
        for group, keys in enumerate(prompt.keys):
            for index, key in enumerate(keys):
                self.described[key] = (group, prompt.blocks(index))

    def store(self, rank: int, tier: str, key: EntryKey) -> None:
        # A worker handles the reset before the stores of later requests.
        if key in self.described and self.has_reset[rank]:
            self.contents[rank].add(tier, key)
            self.held[rank].add((tier, key))

    def store_and_report(self, tier: str, key: EntryKey) -> None:
        for rank in (0, 1):
            self.store(rank, tier, key)
        self.settle()

    def lose(self, rank: int, tier: str, key: EntryKey) -> None:
        self.contents[rank].remove(tier, key)
        self.held[rank].discard((tier, key))

    def reset(self) -> None:
        self.log.clear()
        self.described.clear()
        self.has_reset = [False, False]

    def drop_all(self, rank: int) -> None:
        if not self.has_reset[rank]:
            self.has_reset[rank] = True
            self.contents[rank].clear()
            self.held[rank].clear()

    def send(self, rank: int) -> None:
        change = self.contents[rank].take_change()
        if change is not None:
            self.sent[rank].append(change)

    def deliver(self, rank: int) -> None:
        if self.sent[rank]:
            self.log.note_report(rank, self.sent[rank].popleft())
        self.reader.apply(self.log.take_events())

    def settle(self) -> None:
        for rank in (0, 1):
            self.drop_all(rank)
            self.send(rank)
            while self.sent[rank]:
                self.deliver(rank)

    def check(self) -> None:
        """The reader knows exactly what all ranks hold, but for chunks without a known parent."""
        for key, (group, blocks) in self.described.items():
            for tier in TIERS:
                is_known = (tier, group, blocks.hashes[-1]) in self.reader.known
                is_held = all((tier, key) in held for held in self.held)
                has_parent = blocks.parent is None or self.reader.knows(blocks.parent)
                assert not is_known or is_held
                assert is_known or not (is_held and has_parent)
        hashes = {blocks.hashes for _, blocks in self.described.values()}
        assert {each for _, _, each in self.reader.known} <= {h for each in hashes for h in each}


RANKS = st.sampled_from([0, 1])
OBJECTS = (
    st.sampled_from(TIERS),
    # Few enough that most actions concern the parent or the child of an earlier action's chunk.
    st.sampled_from([*ONE.keys[0], OTHER.keys[0][1], ONE.keys[1][1]]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("offer"), st.sampled_from([ONE, OTHER])),
    st.tuples(st.just("store"), RANKS, *OBJECTS),
    st.tuples(st.just("store_and_report"), *OBJECTS),
    st.tuples(st.just("store_and_report"), *OBJECTS),
    st.tuples(st.just("lose"), RANKS, *OBJECTS),
    st.tuples(st.sampled_from(["send", "deliver", "drop_all"]), RANKS),
    st.tuples(st.just("settle")),
    st.tuples(st.just("reset")),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_a_reader_of_the_events_knows_the_chunks_that_all_ranks_hold(
    actions: list[tuple[Any, ...]],
) -> None:
    engine = Engine()
    engine.offer(ONE)
    engine.offer(OTHER)
    for name, *arguments in actions:
        getattr(engine, name)(*arguments)
    engine.settle()
    engine.check()
    engine.reset()
    engine.settle()
    assert not engine.reader.known


# -- through the connector --


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_events_name_the_blocks_in_each_tier_until_a_reset(
    start: Start, tp_size: int, blocks_per_chunk: int
) -> None:
    side = start(
        tiers=["cpu", "disk"],
        tp_size=tp_size,
        publishes_events=True,
        extra={"blocks_per_chunk": blocks_per_chunk},
    )
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    everything = known("cpu", TOKENS, 4) | known("disk", TOKENS, 4)
    side.step_until(lambda: side.reader.known == everything)
    side.scheduler.reset_cache()
    side.step()
    assert not side.reader.known


@pytest.mark.parametrize("tier", ["cpu", "disk"])
def test_events_name_blocks_of_an_earlier_engine_once_a_request_has_used_them(
    start: Start, tier: str
) -> None:
    first = start(tiers=["cpu", "disk"])
    first.run("a", TOKENS, [1, 2, 3, 4, 5])
    first.step_until(lambda: len(objects(first)) == 4)
    first.close()
    side = start(tiers=[tier], publishes_events=True)
    side.step()
    assert not side.reader.known
    request = side.arrive("b", TOKENS)
    side.load(request, side.ask(request) or 0, [11, 12, 13, 14])
    side.step(Slice("b", 16, ((11, 12, 13, 14),)))
    side.step_until(lambda: side.reader.known == known(tier, TOKENS, 4))


def test_each_group_has_events_of_its_own(start: Start) -> None:
    side = start(groups=(FULL, WINDOW), publishes_events=True)
    side.run("a", TOKENS, [1, 2, 3, 4, 5], [NO_BLOCK, NO_BLOCK, 6, 7, 8])
    window = known("cpu", TOKENS, 4, group=1) - known("cpu", TOKENS, 2, group=1)
    side.step_until(lambda: side.reader.known == known("cpu", TOKENS, 4) | window)


def test_an_engine_that_publishes_no_events_makes_none(start: Start) -> None:
    side = start(tiers=["cpu", "disk"])
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    assert side.num_contents_reports == 0
    assert not side.reader.known
