"""Tests faults of an object store under a running embedded engine. Always: right tokens, no hang, a
counter, one line in the log, and the engine uses the store again when the fault has ended.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.harness import Answer, Cluster, Engine, Prompt, ask_all, until
from tests.e2e.tiered_engine import (
    BLOCK_TOKENS,
    HIT_TOKENS,
    assert_free_of_requests,
    counters,
    prompt_of,
    serve,
    troubles,
    until_counted,
    until_hit,
    until_stored,
)
from tests.tiers.s3_server import ErrorServer, s3_server
from tests.tiers.s3_server import request as ask_s3

from kvferry.testing.fault_proxy import FaultProxy
from kvferry.types import Address

pytestmark = pytest.mark.slow

BUCKET = "faults"
FEW, MANY = 2, 20
"""Chunks of a prompt. A store pauses after the third failure in a row."""
PROMPTS = [prompt_of(number, number) for number in (1, 5, MANY)]


@dataclass
class Store:
    """An object store that fails on command, and a prefix in its bucket."""

    server: Address
    errors: ErrorServer
    proxy: FaultProxy
    """In front of `errors`."""
    prefix: str

    def serve(self, cluster: Cluster, **more: object) -> Engine:
        tier = {
            "bucket": BUCKET,
            "endpoint": f"http://{self.proxy.address}",
            "prefix": self.prefix,
            "store_after": 1,
        }
        settings: dict[str, object] = {"lookup_timeout": 20.0, "load_timeout": 20.0, **more}
        return serve(cluster, "engine", [{"object": tier}], **settings)

    def objects(self) -> list[str]:
        listing = ask_s3(self.server, "GET", f"/{BUCKET}?prefix={self.prefix}")[1].decode()
        return re.findall(r"<Key>([^<]*/[0-9a-f]{64})</Key>", listing)

    def refuse_credentials(self) -> None:
        self.errors.status = 403

    def fail(self) -> None:
        self.errors.status = 500

    def go_down(self) -> None:
        self.proxy.refuse()
        self.proxy.reset()

    def heal(self) -> None:
        self.errors.status = None
        self.errors.is_cutting = False
        self.errors.gets.set()
        self.proxy.flow()
        self.proxy.accept()


@pytest.fixture(scope="module")
def s3() -> Iterator[Address]:
    with s3_server() as server:
        assert ask_s3(server, "PUT", f"/{BUCKET}")[0] == 200
        yield server


@pytest.fixture
def store(s3: Address, tmp_path: Path) -> Iterator[Store]:
    errors = ErrorServer(s3)
    errors.start()
    try:
        with FaultProxy(errors.address, Address("127.0.0.1", 0)) as proxy:
            yield Store(s3, errors, proxy, tmp_path.name)
    finally:
        errors.gets.set()
        errors.close()


def ask(engine: Engine, *prompts: Prompt) -> list[Answer]:
    return asyncio.run(ask_all(engine, prompts))


def store_prompt(engine: Engine, prompt: Prompt, right: Answer) -> None:
    assert ask(engine, prompt) == [right]
    asyncio.run(until_stored(engine, "object", len(prompt.token_ids) // BLOCK_TOKENS))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Store.refuse_credentials, "answered with HTTP status 403: it does not accept"),
        (Store.fail, "answered with HTTP status 500"),
        (Store.go_down, "cannot be reached"),
    ],
)
def test_a_store_that_fails_costs_only_computing(
    cluster: Cluster,
    store: Store,
    plain: Engine,
    fault: Callable[[Store], None],
    reason: str,
) -> None:
    known, new = (prompt_of(FEW, number) for number in range(2))
    right = ask(plain, known, new)
    engine = store.serve(cluster)
    store_prompt(engine, known, right[0])
    fault(store)
    assert ask(engine, known) == right[:1]
    asyncio.run(until_counted(engine, "kvferry:tier_failed_lookups_total/object", 1))
    (line,) = asyncio.run(troubles(engine))
    assert f"KV cannot be looked up tier=object reason=the object store {reason}" in line
    assert ask(engine, new) == right[1:]
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/object", FEW))
    _, line = asyncio.run(troubles(engine, 2))
    assert f"KV cannot be stored tier=object reason=the object store {reason}" in line
    assert asyncio.run(counters(engine))[HIT_TOKENS] == 0
    store.heal()
    asyncio.run(until_hit(engine, known, right[0]))
    asyncio.run(assert_free_of_requests(engine))


def test_connections_that_break_in_the_middle_of_objects_cost_only_computing(
    cluster: Cluster, store: Store, plain: Engine
) -> None:
    known, new = (prompt_of(FEW, number) for number in range(2))
    right = ask(plain, known, new)
    engine = store.serve(cluster)
    store_prompt(engine, known, right[0])
    store.errors.is_cutting = True
    assert ask(engine, known) == right[:1]
    assert asyncio.run(counters(engine))["kvferry:offload_failed_loads_total"] == 1
    assert ask(engine, new) == right[1:]
    asyncio.run(until_counted(engine, "kvferry:tier_failed_loads_total/object", FEW))
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/object", FEW))
    # One line for the loads and one for the stores.
    assert len(asyncio.run(troubles(engine, 2))) == 2
    assert len(store.objects()) == FEW, "half an object is visible"
    store.heal()
    asyncio.run(until_hit(engine, known, right[0]))
    asyncio.run(assert_free_of_requests(engine))


def test_a_slow_store_is_waited_for_until_the_deadline(
    cluster: Cluster, store: Store, plain: Engine
) -> None:
    known = prompt_of(FEW)
    right = ask(plain, known)
    engine = store.serve(cluster, load_timeout=2.0)
    store_prompt(engine, known, right[0])
    store.proxy.delay(0.1)
    assert ask(engine, known) == right
    assert asyncio.run(counters(engine))[HIT_TOKENS] == len(known.token_ids)
    store.errors.gets.clear()
    assert ask(engine, known) == right
    found = asyncio.run(counters(engine))
    assert found["kvferry:offload_failed_loads_total"] == 1
    assert found[HIT_TOKENS] == len(known.token_ids)
    lines = [line for line in engine.process.tail(50) if "load from tiers failed" in line]
    assert len(lines) == 1
    assert "the load took longer than 2 s" in lines[0]
    store.heal()
    asyncio.run(until_hit(engine, known, right[0]))
    asyncio.run(assert_free_of_requests(engine))


def be_slow(store: Store) -> None:
    store.proxy.delay(0.15)


def be_late(store: Store) -> None:
    store.errors.gets.clear()


@pytest.mark.parametrize(
    ("fault", "timeout_s", "num_loaded"), [(be_slow, 20.0, 3), (be_late, 0.5, 0)]
)
def test_a_store_that_is_slower_than_computing_is_not_waited_for_any_more(
    cluster: Cluster,
    store: Store,
    plain: Engine,
    fault: Callable[[Store], None],
    timeout_s: float,
    num_loaded: int,
) -> None:
    """The engine measures three steps and three loads, and then computes."""
    known, *others = (prompt_of(5, number) for number in range(3))
    num_tokens = len(known.token_ids)
    right = ask(plain, known)
    engine = store.serve(cluster, break_even=True, load_timeout=timeout_s)
    store_prompt(engine, known, right[0])
    for other in others:
        ask(engine, other)
    fault(store)
    for _ in range(3):
        assert ask(engine, known) == right
    before = asyncio.run(counters(engine))
    assert before["kvferry:tier_loads_total/object"] == num_loaded * 5
    assert before["kvferry:offload_failed_loads_total"] == 3 - num_loaded
    assert before["kvferry:offload_skipped_tokens_total"] == 0
    assert ask(engine, known) == right
    found = asyncio.run(counters(engine))
    assert found["kvferry:offload_skipped_tokens_total"] == num_tokens
    assert found[HIT_TOKENS] == before[HIT_TOKENS] == num_loaded * num_tokens
    store.heal()
    asyncio.run(assert_free_of_requests(engine))


def test_objects_that_are_evicted_between_lookup_and_load_are_computed(
    cluster: Cluster, store: Store, plain: Engine
) -> None:
    known = prompt_of(FEW)
    right = ask(plain, known)
    engine = store.serve(cluster)
    store_prompt(engine, known, right[0])
    store.errors.gets.clear()

    async def evict_while_asking() -> list[Answer]:
        asking = asyncio.create_task(ask_all(engine, [known]))

        async def is_loading() -> bool:
            return any(seen.method == "GET" for seen in store.errors.seen)

        await until("the engine loads", is_loading)
        for name in store.objects():
            assert ask_s3(store.server, "DELETE", f"/{BUCKET}/{name}")[0] == 204
        store.errors.gets.set()
        return await asking

    assert asyncio.run(evict_while_asking()) == right
    asyncio.run(until_counted(engine, "kvferry:tier_misses_total/object", 1))
    assert asyncio.run(counters(engine))["kvferry:offload_failed_loads_total"] == 1
    assert ask(engine, known) == right
    asyncio.run(assert_free_of_requests(engine))


def test_a_store_that_falls_silent_costs_a_request_its_deadline(
    cluster: Cluster, store: Store, plain: Engine
) -> None:
    known = prompt_of(MANY)
    right = ask(plain, known)
    engine = store.serve(cluster, lookup_timeout=1.0)
    store_prompt(engine, known, right[0])
    timeouts = "kvferry:offload_lookup_timeouts_total"
    before = asyncio.run(counters(engine))[timeouts]
    store.proxy.stall()
    assert ask(engine, known) == right
    asyncio.run(until_counted(engine, timeouts, before + 1))
    assert ask(engine, known) == right
    asyncio.run(assert_free_of_requests(engine))


def test_a_bucket_that_does_not_exist_is_no_error_for_clients(
    cluster: Cluster, s3: Address, plain: Engine
) -> None:
    right = ask(plain, *PROMPTS)
    tier = {"bucket": "missing", "endpoint": f"http://{s3}", "store_after": 1}
    engine = serve(cluster, "engine", [{"object": tier}])
    for _ in range(2):
        assert ask(engine, *PROMPTS) == right
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/object", 1))
    asyncio.run(assert_free_of_requests(engine))


def test_an_object_store_that_is_not_there_at_the_start_does_not_stop_the_engine(
    cluster: Cluster, plain: Engine
) -> None:
    right = ask(plain, *PROMPTS)
    nowhere = Address("127.0.0.1", 9)
    tier = {"bucket": "missing", "endpoint": f"http://{nowhere}", "store_after": 1}
    engine = serve(cluster, "engine", [{"object": tier}])
    assert ask(engine, *PROMPTS) == right
    asyncio.run(until_counted(engine, "kvferry:tier_failed_stores_total/object", 1))
    asyncio.run(assert_free_of_requests(engine))
