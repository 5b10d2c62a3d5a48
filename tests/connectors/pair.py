"""Connectors of two engines in one process: real schedulers, real transfer workers with their
threads, and memory transports between them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.tiers.faulty import GatedCopier

from kvferry.config import KVTransferConfig, SideChannelConfig
from kvferry.connectors.contract import (
    ConnectorConfig,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    ModelIdentity,
    ParallelConfig,
    RequestStatus,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.testing.local import LocalMemory
from kvferry.transports.base import (
    BlockStore,
    CacheMemory,
    ControlTransport,
    DataTransport,
    EngineStream,
    HostStream,
    RowCopier,
)
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.transports.host_buffer.store import CpuHostBuffer, HostBlockStore
from kvferry.transports.memory import MemoryControlTransport, MemoryNetwork, MemoryTransport
from kvferry.types import Region

BLOCK_SIZE, NUM_BLOCKS = 4, 32
DEADLINE_S = 60.0


@dataclass
class FakeDevice:
    type: str = "cpu"


@dataclass
class CacheTensor:
    """A numpy array with the few methods of a torch tensor that connectors use."""

    array: npt.NDArray[np.uint8]
    device: FakeDevice = field(default_factory=FakeDevice)

    @property
    def shape(self) -> Sequence[int]:
        return self.array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self, dim: int) -> int:
        return self.array.strides[dim] // self.array.itemsize

    def element_size(self) -> int:
        return self.array.itemsize


@dataclass
class EngineRequest:
    """A request as the engine shows it to a connector through the contract."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: Any = None
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    cache_salt: str | None = ""
    family: str | None = None
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True)
class Blocks:
    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


@dataclass(frozen=True)
class MemoryKit:
    network: MemoryNetwork
    supports_write_grants: bool = False
    copiers: list[GatedCopier] = field(default_factory=list)
    """The row copiers that this kit has made."""

    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return LocalMemory(size_bytes)

    def data_transports(self, memory: CacheMemory | None) -> list[DataTransport]:
        return [MemoryTransport(self.network, self.supports_write_grants)]

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        return HostBlockStore(regions)

    def host_buffer_store(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory
    ) -> BlockStore:
        return HostBlockStore(host_buffer, CpuHostBuffer(engine, host_buffer))

    def row_copier(self, regions: Sequence[Region]) -> RowCopier:
        self.copiers.append(GatedCopier(CpuRowCopier(regions)))
        return self.copiers[-1]

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        return HostStream()

    def control_transport(self) -> ControlTransport:
        return MemoryControlTransport(self.network)

    def side_channel(self) -> ControlTransport:
        return MemoryControlTransport(self.network)


ALL_LAYERS = KVCacheGroup(("layer.0", "layer.10", "layer.2"))


@dataclass(frozen=True)
class Slice:
    """An implementation of the contract's `ScheduledSlice`."""

    request_id: str
    start: int
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int = 0

    @property
    def num_written(self) -> int:
        return self.start


@dataclass(frozen=True)
class Step:
    """An implementation of the contract's `Step`."""

    slices: tuple[Slice, ...] = ()
    preempted_req_ids: frozenset[str] = frozenset()
    total_num_scheduled_tokens: int = 0


class EngineSide:
    """One engine: the scheduler and the worker role of its connector, and its KV cache memory."""

    def __init__(
        self,
        name: str,
        network: MemoryNetwork,
        policy: str = "fail",
        groups: Sequence[KVCacheGroup] = (ALL_LAYERS,),
        role: str = "kv_both",
        buffer_device: str = "auto",
        connector: str = "NixlConnector",
        supports_write_grants: bool = False,
        **extra: Any,
    ) -> None:
        transfer = KVTransferConfig.from_mapping(
            {
                "kv_connector": connector,
                "kv_role": role,
                "kv_buffer_device": buffer_device,
                "engine_id": name,
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": extra,
            }
        )
        cache = KVCacheConfig(NUM_BLOCKS, BLOCK_SIZE, tuple(groups), "HND", 1, 8, "float32")
        identity = ModelIdentity("Tiny", "abc", 3, 1, 8, "float32")
        config = ConnectorConfig(
            transfer,
            identity,
            ParallelConfig(),
            SideChannelConfig(port=0),
            b"a secret of the cluster",
            f"epoch of {name}",
            MemoryKit(network, supports_write_grants),
        )
        self.memory = {
            layer: np.zeros((NUM_BLOCKS, 1, BLOCK_SIZE, 16), dtype=np.uint8)
            for group in groups
            for layer in group.layer_names
        }
        self.worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches(
            {layer: CacheTensor(array) for layer, array in self.memory.items()}
        )
        self.scheduler = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, cache
        )
        metadata = self.worker.get_handshake_metadata()
        assert metadata is not None
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): metadata})
        self.seen = KVConnectorTransferResults()

    def step(self, step: Step | None = None) -> None:
        """Make the connector calls of one engine step; by default the step schedules no tokens."""
        metadata = self.scheduler.build_connector_meta(step or Step())
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        news = self.worker.get_transfer_results(set())
        self.worker.clear_connector_metadata()
        output = KVConnectorOutput(
            news.finished_sending, news.finished_recving, news.failed_recving
        )
        output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(output)
        # The scheduler's role may change what the engine acts on.
        for name in ("finished_sending", "finished_recving", "failed_recving"):
            assert not getattr(self.seen, name) & getattr(output, name), "reported twice"
            getattr(self.seen, name).update(getattr(output, name))
        self.seen.failure_reasons.update(news.failure_reasons)
        self.seen.optional_failures |= news.optional_failures
        self.seen.given_up_recving.update(news.given_up_recving)

    def prefill(self, request: EngineRequest, *blocks: list[int]) -> dict[str, Any]:
        """Finish a request as if its prompt had been computed into these blocks, and return the
        parameters for the decode side.
        """
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        request.num_computed_tokens = request.num_prompt_tokens
        request.kv_transfer_params = request.kv_transfer_params or {"do_remote_decode": True}
        is_delayed, params = self.scheduler.request_finished_all_groups(request, blocks)
        assert is_delayed
        assert params is not None
        return params

    def fill(self, blocks: list[int], seed: int) -> None:
        for number, array in enumerate(self.memory.values()):
            array[blocks] = np.random.default_rng([seed, number]).integers(
                1, 256, array[blocks].shape, dtype=np.uint8
            )

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()


def step_until(condition: Callable[[], bool], *sides: EngineSide) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, [side.seen for side in sides]
        for side in sides:
            side.step()
        time.sleep(0.001)
