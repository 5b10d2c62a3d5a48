"""Tests `OffloadingConnector` with the calls an engine makes: how many tokens it claims, what it
loads, and what it does when a load fails.
"""

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from tests.connectors.offloading_side import (
    FULL,
    TOKENS,
    WINDOW,
    Side,
    Start,
    kv_of,
    objects,
    objects_of,
)
from tests.connectors.pair import DEADLINE_S, Blocks, Slice

from kvferry.config import OffloadingExtraConfig
from kvferry.connectors.contract import KVCacheGroup
from kvferry.connectors.offloading.settings import open_tiers
from kvferry.errors import ConfigError
from kvferry.host_memory import available_bytes
from kvferry.logs import RepeatFilter
from kvferry.tiers.backoff import StorageFailed
from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import StoreChunks
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.segment_files import segment_paths

# -- stores and loads --


@pytest.mark.parametrize("tiers", [["cpu"], ["disk"], ["cpu", "disk"]])
def test_a_prompt_is_loaded_by_the_next_request(start: Start, tiers: list[str]) -> None:
    side = start(tiers=tiers)
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    if "cpu" not in tiers:
        side.step_until(lambda: len(objects(side)) == 4)
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 16
    side.load(request, 16, [11, 12, 13, 14])
    assert side.loaded == {"b"}
    assert all(side.has(TOKENS, index, [11, 12, 13, 14]) for index in range(4))
    assert not side.finish(request, [11, 12, 13, 14])


def test_a_request_without_a_known_salt_is_neither_stored_nor_loaded(start: Start) -> None:
    side = start()
    side.run("a", TOKENS, [1, 2, 3, 4, 5], cache_salt=None)
    assert not side.commands
    side.run("b", TOKENS, [1, 2, 3, 4, 5])
    request = side.arrive("c", TOKENS, cache_salt=None)
    assert side.ask(request) == 0
    other = side.arrive("d", TOKENS, cache_salt="another tenant")
    assert side.ask(other) == 0


@pytest.mark.parametrize(("num_local", "claimed"), [(0, 16), (4, 0), (8, 8), (12, 0), (16, 0)])
def test_a_local_prefix_that_ends_within_a_chunk_prevents_the_load(
    start: Start, num_local: int, claimed: int
) -> None:
    """Its last block may be shared with other requests, and a chunk is loaded whole."""
    side = start(extra={"blocks_per_chunk": 2})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    request = side.arrive("b", TOKENS)
    assert side.ask(request, num_local) == claimed
    if claimed:
        before = side.memory[0]["layer.0"][[6, 7]].copy()
        side.load(request, claimed, [*[6, 7][: num_local // 4], 11, 12, 13, 14])
        assert (side.memory[0]["layer.0"][[6, 7]] == before).all()


def test_chunks_that_the_engine_has_itself_need_not_be_in_a_tier(start: Start) -> None:
    side = start()
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    damage_chunk(side, TOKENS, 0)
    request = side.arrive("b", TOKENS)
    side.load(request, 16 * (side.ask(request) == 16), [11, 12, 13, 14])
    assert side.failed == {"b"}, "the damaged row is gone now"
    assert side.ask(side.arrive("c", TOKENS)) == 0
    assert side.ask(side.arrive("d", TOKENS), 4) == 12


def damage_chunk(side: Side, tokens: list[int], index: int) -> None:
    """Damage a chunk's row in the host pool."""
    (path,) = segment_paths(side.folder / "pool")
    first_layer = side.groups[0].layer_names[0]
    contents = np.float32(kv_of(tokens, index, first_layer, 0)).tobytes()
    data = path.read_bytes()
    at = data.index(8 * contents)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"damage")


def test_the_output_of_a_preempted_request_is_loaded_with_its_prompt(start: Start) -> None:
    side = start(extra={"offload_prompt_only": False})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    longer = [*TOKENS, 7, 8, 9]
    side.run("b", longer, [1, 2, 3, 4, 5, 6])
    request = side.arrive("c", TOKENS)
    request.output_token_ids = [7, 8, 9]
    assert side.ask(request) == 20


def test_output_is_stored_when_the_request_ends_if_asked_for(start: Start) -> None:
    side = start(extra={"offload_prompt_only": False})
    request = side.arrive("a", TOKENS)
    request.output_token_ids = [7, 8, 9]
    # Of the tokens that are computed, the engine may have dropped the last.
    request.num_computed_tokens = 24
    side.fill(request.all_token_ids, [1, 2, 3, 4, 5, 6])
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    assert side.finish(request, [1, 2, 3, 4, 5, 6])
    assert [len(command.chunks) for command in side.commands_of(StoreChunks)] == [4, 1]
    assert side.ask(side.arrive("b", [*TOKENS, 7, 8, 9])) == 20


# -- lookups --


def remove_chunk(side: Side, tokens: list[int], index: int) -> None:
    """Remove the object of one chunk from the disk."""
    (path,) = objects_of(side, tokens, index)
    path.unlink()


def test_a_lookup_is_pending_until_the_disk_has_answered_or_the_time_is_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = start(tiers=["disk"], extra={"lookup_timeout": 0.05})
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    is_answering = threading.Event()
    find_prefix = DiskTier.find_prefix

    def find_late(tier: DiskTier, keys: Sequence[EntryKey]) -> int:
        assert is_answering.wait(DEADLINE_S)
        return find_prefix(tier, keys)

    monkeypatch.setattr(DiskTier, "find_prefix", find_late)
    request = side.arrive("b", TOKENS)
    assert side.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert side.ask(request) == 0, "the time is over"
    is_answering.set()
    assert side.ask(side.arrive("c", TOKENS)) == 16
    stats = side.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.to_dict()["lookups"]["lookup_timeouts"] == 1


@pytest.mark.parametrize(("groups", "method"), [((FULL,), "find_prefix"), ((FULL, WINDOW), "find")])
def test_lookups_that_a_tier_cannot_answer_are_counted_and_logged_once(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    groups: tuple[KVCacheGroup, ...],
    method: str,
) -> None:
    side = start(tiers=["disk"], groups=groups)
    side.run("a", TOKENS, *[[1, 2, 3, 4, 5], [21, 22, 23, 24, 25]][: len(groups)])
    side.step_until(lambda: len(objects(side)) == 4 * len(groups))
    assert side.ask(side.arrive("b", TOKENS)) == 16

    def fail(tier: DiskTier, keys: Sequence[EntryKey]) -> None:
        raise StorageFailed("the storage failed")

    monkeypatch.setattr(DiskTier, method, fail)
    for name in ("c", "d"):
        assert side.ask(side.arrive(name, TOKENS)) == 0
    stats = side.scheduler.get_kv_connector_stats()
    assert stats is not None
    assert stats.to_dict()["tiers"]["disk"]["failed_lookups"] == 2
    repeats = RepeatFilter()
    shown = [record.getMessage() for record in caplog.records if repeats.filter(record)]
    (line,) = [line for line in shown if "KV cannot be" in line]
    assert "looked up tier=disk reason=the storage failed" in line


def test_a_failed_load_is_tried_once_more_without_the_missing_chunks(start: Start) -> None:
    side = start(tiers=["disk"])
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 16
    remove_chunk(side, TOKENS, 2)
    side.load(request, 16, [11, 12, 13, 14])
    assert side.failed == {"b"}
    assert side.ask(request) == 8
    side.failed.clear()
    side.load(request, 8, [11, 12])
    assert side.loaded == {"b"}
    assert side.has(TOKENS, 1, [11, 12])


def test_a_load_that_fails_twice_is_not_tried_again(start: Start) -> None:
    side = start(tiers=["disk"])
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 4)
    request = side.arrive("b", TOKENS)
    for index, claimed in ((3, 16), (1, 12)):
        assert side.ask(request) == claimed
        remove_chunk(side, TOKENS, index)
        side.failed.clear()
        side.load(request, claimed, [11, 12, 13, 14][: claimed // 4])
        assert side.failed == {"b"}
    assert side.ask(request) == 0


def test_a_request_that_ends_during_its_load_keeps_its_blocks_until_the_copy_ends(
    start: Start,
) -> None:
    side = start()
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.copiers[0].loads.clear()
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 16
    side.scheduler.update_state_after_alloc(request, Blocks(([11, 12, 13, 14],)), 16)
    side.step()
    assert side.scheduler.request_finished(request, [11, 12, 13, 14]) == (False, None)
    side.step()
    assert not side.loaded | side.failed
    side.copiers[0].loads.set()
    side.step_until(lambda: side.failed == {"b"})


# -- ranks --


def test_a_chunk_counts_only_if_every_rank_has_it(start: Start) -> None:
    side = start(tiers=["disk"], tp_size=2)
    side.run("a", TOKENS, [1, 2, 3, 4, 5])
    side.step_until(lambda: len(objects(side)) == 8)
    _, of_rank_1 = objects_of(side, TOKENS, 2)
    of_rank_1.unlink()
    request = side.arrive("b", TOKENS)
    assert side.ask(request) == 8
    side.load(request, 8, [11, 12])
    assert side.has(TOKENS, 0, [11, 12])
    assert side.has(TOKENS, 1, [11, 12])


def test_blocks_are_kept_until_every_rank_has_copied_them(start: Start) -> None:
    side = start(tp_size=2)
    side.copiers[1].saves.clear()
    request = side.arrive("a", TOKENS)
    request.num_computed_tokens = 18
    side.step(Slice("a", 18, ((1, 2, 3, 4, 5),)))
    for _ in range(5):
        side.step()
        time.sleep(0.002)
    assert side.scheduler.request_finished(request, [1, 2, 3, 4, 5]) == (True, None)
    side.step()
    assert not side.freed
    side.copiers[1].saves.set()
    side.step_until(lambda: side.freed == {"a"})


# -- settings --


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ("31MiB", "lends 16252928 bytes of each rank"),
        (4 * available_bytes(), "free in this host or container"),
    ],
    ids=["too little", "too much"],
)
def test_a_rank_lends_mooncake_neither_too_little_nor_more_than_it_has(
    size: str | int, problem: str
) -> None:
    extra = OffloadingExtraConfig.from_mapping(
        {"tiers": [{"mooncake": {"master": "127.0.0.1:9", "size": size}}]}, "OffloadingConnector"
    )
    with pytest.raises(ConfigError, match=problem):
        open_tiers(extra, Namespace({}), b"secret", 2)
