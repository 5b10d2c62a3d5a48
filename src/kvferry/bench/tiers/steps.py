"""What the tiers cost the engine's thread: the connector's calls for a lookup and for storing,
with few and with many blocks in the host pool.

Both sides of the connector are real, with their pool and threads, in this process. There is no
model: this module makes the calls of an engine, and measures these calls alone. An engine whose
ranks are processes of their own pickles the message of each step, and its thread does not make the
calls of the worker half: those steps are measured too.
"""

import gc
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from kvferry.bench.figures import quantile, rounded
from kvferry.cli.runtime import StopRequest
from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    ModelIdentity,
    ParallelConfig,
    RequestStatus,
    SchedulerSide,
    WorkerSide,
)
from kvferry.connectors.offloading.connector import OffloadingConnector
from kvferry.errors import KVFerryError
from kvferry.transports.registry import ConfiguredTransportKit

T = TypeVar("T")

BLOCK_SIZE, WIDTH = 16, 32
LAYERS = ("layer.0", "layer.1")
BLOCK_BYTES = len(LAYERS) * BLOCK_SIZE * WIDTH
ROW_BYTES = 4096
"""A row fills whole pages."""
PROMPT_BLOCKS = 250
"""4,000 tokens."""
NUM_DECODING = 64
COMPUTE_S = 0.005
"""How long a step of the decoding requests takes: for as many tokens, a load takes less."""
STORE_S = 60.0


@dataclass(frozen=True, slots=True)
class StepScope:
    pool_blocks: tuple[int, ...] = (1_000, 10_000)
    rounds: int = 50
    other_work_s: tuple[float, ...] = (0.0, 0.005)
    """How long the thread does something else before each measurement. Other work takes the caches
    of the processor, and so do other programs.
    """


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of one kind of call on the engine's thread."""

    work: str
    pool_blocks: int
    other_work_s: float
    chunks: int
    """The chunks that one call is about; 0 if it is about none."""
    seconds: Sequence[float]

    def as_json(self) -> dict[str, Any]:
        p99 = quantile(self.seconds, 0.99) or 0.0
        return {
            "work": self.work,
            "pool_blocks": self.pool_blocks,
            "after_ms": rounded(1e3 * self.other_work_s),
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
    num_written: int
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


class _Part(Enum):
    """Who pays for a call, if the ranks are processes of their own."""

    SCHEDULER = "the engine's thread"
    WORKER = "a rank"
    MESSAGE = "the engine's thread, which pickles the message"


@dataclass(slots=True)
class _CallClock:
    """Adds up the time of calls since `restart`."""

    other_work_s: float = 0.0
    """How long the thread does something else before the calls that are measured."""
    seconds: dict[_Part, float] = field(default_factory=lambda: dict.fromkeys(_Part, 0.0))

    def restart(self) -> None:
        _spin(self.other_work_s)
        self.seconds = dict.fromkeys(_Part, 0.0)

    def call(self, part: _Part, call: Callable[..., T], *arguments: Any) -> T:
        began = time.perf_counter()
        result = call(*arguments)
        self.seconds[part] += time.perf_counter() - began
        return result


@dataclass(slots=True)
class _Engine:
    """Both sides of the connector, and the calls of an engine."""

    scheduler: SchedulerSide
    worker: WorkerSide
    finished: set[str] = field(default_factory=set)
    """Requests whose stores or loads have ended."""
    num_requests: int = 0
    clock: _CallClock = field(default_factory=_CallClock)

    def new_request(self, prompt: int) -> _Request:
        """A request whose prompt is the one of this number."""
        self.num_requests += 1
        tokens = [prompt, *range(BLOCK_SIZE * PROMPT_BLOCKS - 1)]
        return _Request(f"request-{self.num_requests}", tokens)

    def step(self, *slices: _Slice, compute_s: float = 0.0) -> None:
        call, scheduler, worker = self.clock.call, self.scheduler, self.worker
        metadata = call(_Part.SCHEDULER, scheduler.build_connector_meta, _Step(slices))
        call(_Part.WORKER, worker.bind_connector_metadata, metadata)
        _spin(compute_s)
        results = call(_Part.WORKER, worker.get_transfer_results, set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            failure_reasons=results.failure_reasons,
            kv_connector_worker_meta=call(_Part.WORKER, worker.build_connector_worker_meta),
        )
        call(_Part.SCHEDULER, scheduler.update_connector_output, output)
        call(_Part.MESSAGE, pickle.dumps, metadata, pickle.HIGHEST_PROTOCOL)
        if results.failed_recving:
            raise KVFerryError(f"a load failed: {results.failure_reasons}")
        self.finished |= results.finished_sending | results.finished_recving

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
        is_kept, _ = self.scheduler.request_finished_all_groups(request, (BLOCK_IDS,))
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
        worker = OffloadingConnector.make_worker(config, cache)
        with closing(_Closed(worker)):
            shape = (PROMPT_BLOCKS, 1, BLOCK_SIZE, WIDTH)
            worker.register_kv_caches(
                {
                    name: _Tensor(memory.address + n * layer_bytes, shape)
                    for n, name in enumerate(LAYERS)
                }
            )
            scheduler = OffloadingConnector.make_scheduler(config, cache)
            with closing(_Closed(scheduler)):
                metadata = worker.get_handshake_metadata()
                assert metadata is not None
                scheduler.set_xfer_handshake_metadata({0: metadata})
                yield _Engine(scheduler, worker)
    memory.close()


@dataclass(frozen=True, slots=True)
class _Closed:
    connector: SchedulerSide | WorkerSide

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
            for other_work_s in scope.other_work_s:
                engine.clock.other_work_s = other_work_s
                seconds = _measure(engine, scope.rounds, stop)
                for work, chunks in _WORKS.items():
                    yield StepCost(work, pool_blocks, other_work_s, chunks, seconds[work])


def _measure(engine: _Engine, rounds: int, stop: StopRequest) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in _WORKS}
    gc.collect()
    for _ in range(rounds):
        stop.check()
        # Each round makes two requests, and stores a new prompt, for which the pool evicts an old
        # one. The first two are used in turn, so they stay.
        _one_round(engine, engine.num_requests // 2 % 2, -1 - engine.num_requests, seconds)
    return seconds


_WORKS = {
    "keys of a new request, once": PROMPT_BLOCKS,
    "lookup, all stored": PROMPT_BLOCKS,
    "lookup, nothing stored": PROMPT_BLOCKS,
    "step that loads": PROMPT_BLOCKS,
    "step that stores": PROMPT_BLOCKS,
    f"step of {NUM_DECODING} decoding requests": 0,
    "step that loads, ranks apart": PROMPT_BLOCKS,
    "step that stores, ranks apart": PROMPT_BLOCKS,
}


def _one_round(engine: _Engine, stored: int, new: int, seconds: dict[str, list[float]]) -> None:
    """Measure each kind of call once. `stored` and `new` number a stored and a new prompt."""
    arrivals, hits, misses, loads, stores, decodes, loads_apart, stores_apart = _WORKS
    scheduler, clock = engine.scheduler, engine.clock

    def note(work: str, work_apart: str | None = None) -> None:
        spent = clock.seconds
        seconds[work].append(spent[_Part.SCHEDULER] + spent[_Part.WORKER])
        if work_apart is not None:
            seconds[work_apart].append(spent[_Part.SCHEDULER] + spent[_Part.MESSAGE])
        clock.restart()

    request = engine.new_request(stored)
    clock.restart()
    clock.call(_Part.SCHEDULER, scheduler.on_new_request, request)
    note(arrivals)
    found, _ = clock.call(_Part.SCHEDULER, scheduler.get_num_new_matched_tokens, request, 0)
    note(hits)
    # The last token is computed, so its chunk may not be used.
    if not found or found < BLOCK_SIZE * (PROMPT_BLOCKS - 1):
        raise KVFerryError(f"only {found} tokens of a stored prompt were found")
    clock.call(
        _Part.SCHEDULER, scheduler.update_state_after_alloc, request, _Blocks(BLOCK_IDS), found
    )
    engine.step()
    note(loads, loads_apart)
    engine.wait_for(request)
    request.num_computed_tokens = found
    engine.finish(request)

    fresh = engine.new_request(new)
    scheduler.on_new_request(fresh)
    clock.restart()
    missed, _ = clock.call(_Part.SCHEDULER, scheduler.get_num_new_matched_tokens, fresh, 0)
    note(misses)
    if missed:
        raise KVFerryError(f"{missed} tokens of a new prompt were found")
    fresh.num_computed_tokens = fresh.num_tokens
    part = _Slice(fresh.request_id, fresh.num_tokens, (tuple(BLOCK_IDS),))
    engine.step(part)
    note(stores, stores_apart)
    engine.finish(fresh)
    clock.restart()
    engine.step(*[part] * NUM_DECODING, compute_s=COMPUTE_S)
    note(decodes)


def _spin(seconds: float) -> None:
    """Keep the thread busy, as an engine that computes."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
