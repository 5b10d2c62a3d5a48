"""One engine's connector, both halves, with its real ferry, in a process of its own: what `kvferry bench leases` measures.

There is no model. The main thread does what an engine's does with its connector in a step, or sleeps, and times itself.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Any

from kvferry.bench.figures import quantile
from kvferry.cli.planes import ConfiguredTransportKit
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
    SupportsHMA,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.connectors.stats import merge_stats
from kvferry.errors import KVFerryError

__all__ = ["LeaseBenchEngine", "RemoteCall", "run_engine_process"]

BLOCK_SIZE, NUM_BLOCKS, WIDTH = 16, 256, 32
LAYERS = ("layer.0", "layer.1")
PROMPT_TOKENS = 40
WORK = bytes(2**20)
"""What is computed on between steps: as a forward pass does, it keeps the core busy for a while and leaves the interpreter to the transfer
worker.
"""


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """A call of a method of `LeaseBenchEngine`, sent to its process."""

    method: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One layer's cache, as far as connectors look at it."""

    address: int
    shape: Sequence[int] = (NUM_BLOCKS, 1, BLOCK_SIZE, WIDTH)
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
    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
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


@dataclass(slots=True)
class LeaseBenchEngine:
    config: ConnectorConfig
    totals: dict[str, Any] = field(default_factory=dict)
    is_closed: bool = False
    worker: Any = field(init=False)
    scheduler: Any = field(init=False)

    def __post_init__(self) -> None:
        cache = KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE, (KVCacheGroup(LAYERS),), "HND", 1, WIDTH // 2, "uint8")
        memory = self.config.cache_memory
        assert memory is not None
        layer_bytes = memory.size_bytes // len(LAYERS)
        self.worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches({name: _Tensor(memory.address + i * layer_bytes) for i, name in enumerate(LAYERS)})
        self.scheduler = KVConnectorFactory.create_connector(self.config, KVConnectorRole.SCHEDULER, cache)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def step(self) -> None:
        """All calls of one engine step without tokens, in the engine's order."""
        scheduler, worker = self.scheduler, self.worker
        scheduler.has_pending_push_work()
        metadata = scheduler.build_connector_meta(None)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        for name in LAYERS:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, None, None)
        worker.finish_forward()
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            failure_reasons=results.failure_reasons,
            given_up_recving=results.given_up_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_cache_events=worker.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        worker.clear_connector_metadata()
        scheduler.update_connector_output(output)
        for stats in (output.kv_connector_stats, scheduler.get_kv_connector_stats()):
            if stats is not None:
                merge_stats(self.totals, stats.to_dict())

    # -- what the benchmark asks for -------------------------------------------------------------------------------

    def issue(self, count: int) -> list[dict[str, Any]]:
        """As P: so many finished prefills, and their parameters for D."""
        assert isinstance(self.scheduler, SupportsHMA)
        issued = []
        for number in range(count):
            request = _Request(f"lease-{number}", _prompt(number), {"do_remote_decode": True}, RequestStatus.FINISHED_LENGTH_CAPPED)
            request.num_computed_tokens = PROMPT_TOKENS
            blocks = [(3 * number + i) % NUM_BLOCKS for i in range(3)]
            _, params = self.scheduler.request_finished_all_groups(request, (blocks,))
            assert params is not None
            issued.append(params)
            # Each lease begins at a time of its own, as it does in life.
            self.step()
        return issued

    def track(self, params: list[dict[str, Any]]) -> None:
        """As D: so many requests that wait for blocks."""
        for number, one in enumerate(params):
            self.scheduler.on_new_request(_Request(f"pull-{number}", _prompt(number), one))
        self.step()

    def level(self, name: str) -> int:
        """A gauge of the connector, as it was in the last step."""
        self.step()
        return sum(self.totals.get("levels", {}).get(name, {}).values())

    def measure(self, seconds: float) -> dict[str, float]:
        """Steps for so long, one at a time: what they cost this thread."""
        gc.collect()
        walls, cpus = [], []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            sha256(WORK)
            cpu, wall = time.thread_time(), time.perf_counter()
            self.step()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.thread_time() - cpu)
        found = {"p50": quantile(walls, 0.5), "p99": quantile(walls, 0.99), "cpu": sum(cpus) / len(cpus)}
        return {name: round(1e6 * (value or 0.0), 1) for name, value in found.items()} | {"steps": len(walls)}

    def idle(self, seconds: float) -> float:
        """The share of a core that this process takes while its engine sleeps."""
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(seconds)
        return (time.process_time() - cpu) / (time.monotonic() - wall)

    def close(self) -> None:
        self.is_closed = True
        self.scheduler.shutdown()
        self.worker.shutdown()


def run_engine_process(link: Connection, name: str, transport: str, lease_s: float, secret: bytes) -> None:
    """The main function of a side's process: answers calls until `close`, or until whoever asks is gone."""
    side_channel = SideChannelConfig(port=0)
    kit = ConfiguredTransportKit(side_channel.bind_host, side_channel.advertised_host, 0, secret, transports=(transport,))
    extra = {"transports": [transport], "kv_lease_duration": lease_s}
    mapping = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "engine_id": name, "kv_connector_extra_config": extra}
    memory = kit.allocate_cache(len(LAYERS) * NUM_BLOCKS * BLOCK_SIZE * WIDTH)
    identity = ModelIdentity("None", "none", len(LAYERS), 1, WIDTH // 2, "uint8")
    transfer = KVTransferConfig.from_mapping(mapping)
    side = LeaseBenchEngine(ConnectorConfig(transfer, identity, ParallelConfig(), side_channel, secret, f"epoch of {name}", kit, memory))
    try:
        while not side.is_closed:
            call = link.recv()
            method: Callable[..., Any] = getattr(side, call.method)
            link.send(method(*call.arguments))
    except EOFError:
        raise KVFerryError("the benchmark has ended") from None
    finally:
        if not side.is_closed:
            side.close()


def _prompt(number: int) -> list[int]:
    return [10 + (number >> (6 * (i % 5))) % 64 + i for i in range(PROMPT_TOKENS)]
