"""What the tiers cost the engine's thread: the connector's calls for a lookup and for storing,
with few and with many blocks in the host pool.

Both halves of the connector are real, with their pool and threads, in this process. There is no
model: this module makes the calls of an engine.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from kvferry.bench.figures import quantile, rounded
from kvferry.cli.runtime import StopRequest
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    KVConnectorRole,
    ModelIdentity,
    ParallelConfig,
    RequestStatus,
)
from kvferry.connectors.offloading.connector import OffloadingConnector
from kvferry.errors import KVFerryError
from kvferry.transports.registry import ConfiguredTransportKit

__all__ = ["StepCost", "StepScope", "measure_steps"]

BLOCK_SIZE, WIDTH = 16, 32
LAYERS = ("layer.0", "layer.1")
BLOCK_BYTES = len(LAYERS) * BLOCK_SIZE * WIDTH
ROW_BYTES = 4096
"""A row fills whole pages."""
PROMPT_BLOCKS = 250
"""4,000 tokens."""
NUM_DECODING = 64
STORE_S = 60.0


@dataclass(frozen=True, slots=True)
class StepScope:
    pool_blocks: tuple[int, ...] = (1_000, 10_000)
    rounds: int = 50


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of one kind of call on the engine's thread."""

    work: str
    pool_blocks: int
    chunks: int
    """The chunks that one call is about; 0 if it is about none."""
    seconds: Sequence[float]

    def as_json(self) -> dict[str, Any]:
        p99 = quantile(self.seconds, 0.99) or 0.0
        return {
            "work": self.work,
            "pool_blocks": self.pool_blocks,
            "chunks": self.chunks,
            "calls": len(self.seconds),
            "us": rounded(1e6 * median(self.seconds)),
            "us_p99": rounded(1e6 * p99),
            "us_worst": rounded(1e6 * max(self.seconds)),
            "us_per_chunk": rounded(1e6 * median(self.seconds) / self.chunks, 3)
            if self.chunks
            else None,
        }


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The attributes of a layer's cache tensor that connectors use."""

    address: int
    shape: Sequence[int]
    device: str = "cpu"

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int) -> int:
        stride = 1
        for size in self.shape[dim + 1 :]:
            stride *= size
        return stride

    def element_size(self) -> int:
        return 1


@dataclass(slots=True)
class _Request:
    """The attributes of an engine request that connectors use."""

    request_id: str
    prompt_token_ids: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    status: RequestStatus = RequestStatus.RUNNING
    cache_salt: str = ""
    family: str | None = None

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class _Slice:
    request_id: str
    start: int
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Step:
    """The parts of a scheduler's output that the connector reads."""

    slices: tuple[_Slice, ...] = ()
    preempted_req_ids: frozenset[str] = frozenset()

    @property
    def total_num_scheduled_tokens(self) -> int:
        return len(self.slices)


@dataclass(frozen=True, slots=True)
class _Blocks:
    block_ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.block_ids,)


@dataclass(slots=True)
class _Engine:
    """Both halves of the connector, and the calls of an engine."""

    scheduler: OffloadingConnector
    worker: OffloadingConnector
    finished: set[str] = field(default_factory=set)
    """Requests whose stores or loads have ended."""
    num_requests: int = 0

    def new_request(self, prompt: int) -> _Request:
        """A request whose prompt is the one of this number."""
        self.num_requests += 1
        tokens = [prompt, *range(BLOCK_SIZE * PROMPT_BLOCKS - 1)]
        return _Request(f"request-{self.num_requests}", tokens)

    def step(self, *slices: _Slice) -> None:
        metadata = self.scheduler.build_connector_meta(_Step(slices))
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        results = self.worker.get_transfer_results(set())
        self.scheduler.update_connector_output(
            KVConnectorOutput(
                finished_sending=results.finished_sending,
                finished_recving=results.finished_recving,
                failed_recving=results.failed_recving,
                failure_reasons=results.failure_reasons,
                kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
            )
        )
        if results.failed_recving:
            raise KVFerryError(f"a load failed: {results.failure_reasons}")
        self.finished |= results.finished_sending | results.finished_recving
        self.worker.clear_connector_metadata()

    def wait_for(self, request: _Request) -> None:
        """Step until the stores or the load of a request have ended."""
        deadline = time.monotonic() + STORE_S
        while request.request_id not in self.finished:
            if time.monotonic() > deadline:
                raise KVFerryError(f"the host pool did not answer within {STORE_S:g} s")
            self.step()
            time.sleep(0.0005)
        self.finished.discard(request.request_id)

    def store(self, prompt: int) -> None:
        """Compute a prompt, store its chunks and finish it."""
        request = self.new_request(prompt)
        self.scheduler.on_new_request(request)
        self.scheduler.get_num_new_matched_tokens(request, 0)
        request.num_computed_tokens = request.num_tokens
        self.finish(request)

    def finish(self, request: _Request) -> None:
        is_kept, _ = self.scheduler.request_finished(request, BLOCK_IDS)
        if is_kept:
            self.wait_for(request)
        else:
            self.step()


BLOCK_IDS = list(range(PROMPT_BLOCKS))


@contextmanager
def _engine(pool_blocks: int) -> Iterator[_Engine]:
    secret = b"the secret of the benchmark"
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(
        side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=("shm",)
    )
    layer_bytes = PROMPT_BLOCKS * BLOCK_SIZE * WIDTH
    memory = kit.allocate_cache(len(LAYERS) * layer_bytes)
    cache = KVCacheConfig(
        PROMPT_BLOCKS, BLOCK_SIZE, (KVCacheGroup(LAYERS),), "HND", 1, WIDTH // 2, "uint8"
    )
    with TemporaryDirectory(prefix="kvferry-bench-", dir=_memory_folder()) as folder:
        transfer = KVTransferConfig.from_mapping(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "tiers": [{"cpu": (pool_blocks + 2 * PROMPT_BLOCKS) * ROW_BYTES}],
                    "pool_path": f"{folder}/pool",
                    "break_even": False,
                },
            }
        )
        config = ConnectorConfig(
            transfer,
            ModelIdentity("None", "none", len(LAYERS), 1, WIDTH // 2, "uint8"),
            ParallelConfig(),
            side_channel,
            secret,
            "benchmark",
            kit,
            memory,
        )
        worker = OffloadingConnector(config, KVConnectorRole.WORKER, cache)
        with closing(_Closed(worker)):
            shape = (PROMPT_BLOCKS, 1, BLOCK_SIZE, WIDTH)
            worker.register_kv_caches(
                {
                    name: _Tensor(memory.address + n * layer_bytes, shape)
                    for n, name in enumerate(LAYERS)
                }
            )
            scheduler = OffloadingConnector(config, KVConnectorRole.SCHEDULER, cache)
            with closing(_Closed(scheduler)):
                metadata = worker.get_handshake_metadata()
                assert metadata is not None
                scheduler.set_xfer_handshake_metadata({0: metadata})
                yield _Engine(scheduler, worker)
    memory.close()


@dataclass(frozen=True, slots=True)
class _Closed:
    connector: OffloadingConnector

    def close(self) -> None:
        self.connector.shutdown()


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def measure_steps(scope: StepScope, stop: StopRequest) -> Iterator[StepCost]:
    """Yield the cost of every kind of call, for each size of the pool."""
    for pool_blocks in scope.pool_blocks:
        with _engine(pool_blocks) as engine:
            for prompt in range(pool_blocks // PROMPT_BLOCKS):
                stop.check()
                engine.store(prompt)
            yield from _measure(engine, pool_blocks, scope.rounds, stop)


def _measure(
    engine: _Engine, pool_blocks: int, rounds: int, stop: StopRequest
) -> Iterator[StepCost]:
    seconds: dict[str, list[float]] = {name: [] for name in _WORKS}
    gc.collect()
    for turn in range(rounds):
        stop.check()
        # Each round stores a new prompt, for which the pool evicts an old one. The first two are
        # used so often that they stay.
        _one_round(engine, turn % 2, -1 - turn, seconds)
    for work, chunks in _WORKS.items():
        yield StepCost(work, pool_blocks, chunks, seconds[work])


_WORKS = {
    "keys of a new request, once": PROMPT_BLOCKS,
    "lookup, all stored": PROMPT_BLOCKS,
    "lookup, nothing stored": PROMPT_BLOCKS,
    "step that loads": PROMPT_BLOCKS,
    "step that stores": PROMPT_BLOCKS,
    f"step of {NUM_DECODING} decoding requests": 0,
}


def _one_round(engine: _Engine, stored: int, new: int, seconds: dict[str, list[float]]) -> None:
    """Measure each kind of call once. `stored` and `new` number a stored and a new prompt."""
    arrivals, hits, misses, loads, stores, decodes = _WORKS
    scheduler = engine.scheduler

    request = engine.new_request(stored)
    _timed(seconds[arrivals], lambda: scheduler.on_new_request(request))
    found = _timed(seconds[hits], lambda: _look_up(scheduler, request))
    # The last token is computed, so its chunk may not be used.
    if not found or found < BLOCK_SIZE * (PROMPT_BLOCKS - 1):
        raise KVFerryError(f"only {found} tokens of a stored prompt were found")

    def load() -> None:
        scheduler.update_state_after_alloc(request, _Blocks(BLOCK_IDS), found)
        engine.step()

    _timed(seconds[loads], load)
    engine.wait_for(request)
    request.num_computed_tokens = found
    engine.finish(request)

    fresh = engine.new_request(new)
    scheduler.on_new_request(fresh)
    missed = _timed(seconds[misses], lambda: _look_up(scheduler, fresh))
    if missed:
        raise KVFerryError(f"{missed} tokens of a new prompt were found")
    fresh.num_computed_tokens = fresh.num_tokens
    part = _Slice(fresh.request_id, fresh.num_tokens, (tuple(BLOCK_IDS),))
    _timed(seconds[stores], lambda: engine.step(part))
    decoding = tuple(part for _ in range(NUM_DECODING))
    _timed(seconds[decodes], lambda: engine.step(*decoding))
    engine.finish(fresh)


def _look_up(scheduler: OffloadingConnector, request: _Request) -> int:
    found, _ = scheduler.get_num_new_matched_tokens(request, 0)
    return found or 0


def _timed(seconds: list[float], call: Callable[[], Any]) -> Any:
    began = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - began)
    return result
