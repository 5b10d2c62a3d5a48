"""Measures what `OffloadingConnector` costs the engine's thread, with a host pool of 10,000 rows.

    python benchmarks/measure_offload_scheduler.py

Prints medians of the thread's CPU time in microseconds: the message of a step with 64 running
requests, without and with a prefill of 2,048 tokens that has just been computed; how long pickling
that message takes; the first and later lookups of a prompt of 4,000 tokens whose chunks are all in
the pool; and the hashing of such a prompt, which happens once for each request.
"""

import pickle
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.config import KVTransferConfig, OffloadingExtraConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    ModelIdentity,
    ParallelConfig,
    RequestStatus,
)
from kvferry.connectors.offloading.metadata import OffloadingHandshakeMetadata
from kvferry.connectors.offloading.scheduler import OffloadingScheduler
from kvferry.tiers.keys import KeyChain, Namespace
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import LruPolicy

BLOCK_SIZE, NUM_ROWS, ROW_BYTES = 16, 10_000, 4096
NUM_RUNNING, PREFILL_TOKENS, PROMPT_TOKENS = 64, 2048, 4000
REPEATS = 200


@dataclass
class MeasuredRequest:
    """A request as the engine shows it to a connector through the contract."""

    request_id: str
    prompt_token_ids: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: Any = None
    cache_salt: str | None = ""
    family: str | None = None
    status: RequestStatus = RequestStatus.RUNNING

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    num_tokens = num_prompt_tokens

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids


@dataclass(frozen=True)
class Slice:
    request_id: str
    num_written: int
    table: list[int]
    num_tokens: int = 1

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(self.table),)


def median_us(call: Callable[[int], object]) -> float:
    times = []
    for number in range(REPEATS):
        began = time.thread_time()
        call(number)
        times.append(time.thread_time() - began)
    return statistics.median(times) * 1e6


@dataclass(frozen=True)
class MeasuredStep:
    """A step as the engine shows it to a connector through the contract."""

    slices: list[Any]
    preempted_req_ids: frozenset[str] = frozenset()
    total_num_scheduled_tokens: int = NUM_RUNNING


def make_scheduler(folder: Path, factors: dict[str, Any]) -> OffloadingScheduler:
    extra = {"tiers": [{"cpu": NUM_ROWS * ROW_BYTES}], "pool_path": str(folder)}
    transfer = KVTransferConfig.from_mapping(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": "measured",
            "kv_connector_extra_config": extra,
        }
    )
    config = ConnectorConfig(
        transfer,
        ModelIdentity("Tiny", "abc", 3, 1, 8, "float32"),
        ParallelConfig(),
        SideChannelConfig(port=0),
        b"a secret of the cluster",
        "epoch",
        kit=None,  # type: ignore[arg-type]  # only workers use it
    )
    cache = KVCacheConfig(NUM_ROWS, BLOCK_SIZE, (KVCacheGroup(("layer",)),), "HND", 1, 8, "float32")
    assert isinstance(transfer.extra, OffloadingExtraConfig)
    scheduler = OffloadingScheduler(config, cache, transfer.extra)
    scheduler.set_xfer_handshake_metadata(
        {0: OffloadingHandshakeMetadata(0, factors, (ROW_BYTES,))}
    )
    return scheduler


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(length)]


def main() -> None:
    rng = random.Random(0)
    factors = {"model": "measured"}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name) / "pool"
        pool = HostPool.open(folder, Namespace(factors), ROW_BYTES, NUM_ROWS, LruPolicy)
        known = prompt(rng, PROMPT_TOKENS)
        chain = KeyChain(BLOCK_SIZE, "")
        chain.extend(known, len(known))
        others = KeyChain(BLOCK_SIZE, "")
        others.extend(prompt(rng, BLOCK_SIZE * (NUM_ROWS - len(chain))), BLOCK_SIZE * NUM_ROWS)
        for key in (*chain.keys[0], *others.keys[0]):
            row = pool.reserve(key)
            assert row is not None
            pool.publish(row, 7)
        scheduler = make_scheduler(folder, factors)
        try:
            measure(scheduler, known, rng)
        finally:
            scheduler.shutdown()
            pool.close()


def measure(scheduler: OffloadingScheduler, known: list[int], rng: random.Random) -> None:
    running = [MeasuredRequest(f"running {n}", prompt(rng, 500)) for n in range(NUM_RUNNING)]
    decodes = [Slice(request.request_id, 520, list(range(33))) for request in running]
    for request in running:
        scheduler.on_new_request(request)
    for _ in range(10):
        scheduler.build_connector_meta(MeasuredStep(decodes))

    prompts = [prompt(rng, PREFILL_TOKENS) for _ in range(REPEATS)]
    prefills = [MeasuredRequest(f"prefill {n}", tokens) for n, tokens in enumerate(prompts)]
    table = list(range(PREFILL_TOKENS // BLOCK_SIZE))
    messages = []

    def build(slices: list[Slice]) -> None:
        messages.append(scheduler.build_connector_meta(MeasuredStep(slices)))
        scheduler.update_connector_output(KVConnectorOutput())

    hashing = median_us(lambda n: scheduler.on_new_request(prefills[n]))
    steps = [[*decodes, Slice(request.request_id, PREFILL_TOKENS, table)] for request in prefills]
    print(f"step of {NUM_RUNNING} running requests      {median_us(lambda n: build(decodes)):8.1f}")
    print(f"step after a prefill of 2,048    {median_us(lambda n: build(steps[n])):8.1f}")
    pickling = median_us(lambda n: pickle.dumps(messages[-1]))
    print(f"pickling that message            {pickling:8.1f}")
    asked = [MeasuredRequest(f"asked {n}", known) for n in range(REPEATS)]
    print(f"hashing a prompt of 2,048        {hashing:8.1f}")
    arrival = median_us(lambda n: scheduler.on_new_request(asked[n]))
    print(f"arrival of a prompt of 4,000     {arrival:8.1f}")

    def ask(request: MeasuredRequest) -> None:
        assert scheduler.get_num_new_matched_tokens(request, 0) == (PROMPT_TOKENS, True)

    print(f"first lookup of a prompt         {median_us(lambda n: ask(asked[n])):8.1f}")
    print(f"later lookups in the same step   {median_us(lambda n: ask(asked[0])):8.1f}")


if __name__ == "__main__":
    main()
