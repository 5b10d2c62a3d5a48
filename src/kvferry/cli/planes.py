"""The makers of planes that an engine is started with: the one place that chooses which there are.

A `Kit` is plain data and travels to spawned worker processes; what it makes belongs to whoever asked.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvferry.config import (
    ClusterSecret,
    KVTransferConfig,
    MultiExtraConfig,
    NixlExtraConfig,
    SideChannelConfig,
    fault_spec_from_environment,
    is_loopback,
)
from kvferry.errors import ConfigError
from kvferry.planes.block_store import HostBlockStore
from kvferry.planes.cuda_ipc import CudaIpcDataPlane
from kvferry.planes.fabric import has_fabric
from kvferry.planes.mirror import HostMirror
from kvferry.planes.nixl import NetworkReach, NixlDataPlane
from kvferry.planes.shm import SharedMemory, ShmDataPlane
from kvferry.planes.staged_nixl import StagedNixlDataPlane, StagingSettings
from kvferry.planes.tcp import TcpDataPlane
from kvferry.planes.zmq import CurveKeys, ZmqControlPlane
from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlPlane
from kvferry.ports.data import DataPlane
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineOrder, HostOrder
from kvferry.types import MemoryKind, Region

__all__ = ["Kit", "nixl_settings"]

IMPLEMENTED = ("shm", "cuda_ipc", "nixl", "tcp")
"""In order of preference. NIXL without RDMA says itself that it is good on one host only; then `tcp` is before it."""


NIXL_OVER_TCP = (
    "planes names nixl alone, and UCX has only TCP to reach other hosts from here: a peer that dies while it reads can end this process "
    "(a fault of UCX, docs/faults.md); `tcp` does not have it, and is faster"
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kit:
    """Implements `ports.kit.PlaneKit`."""

    bind_host: str
    advertised_host: str
    port: int
    secret: bytes = field(repr=False)
    """Empty without a connector: then no plane but memory is asked for."""
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 4
    staging: StagingSettings = field(default_factory=StagingSettings)
    planes: tuple[str, ...] = IMPLEMENTED
    faults: str = ""
    """What data planes do wrong on purpose; for negative controls."""

    @classmethod
    def from_settings(
        cls,
        side_channel: SideChannelConfig,
        secret: ClusterSecret | None,
        transfer: KVTransferConfig | None,
        environ: Mapping[str, str],
    ) -> Self:
        nixl = nixl_settings(transfer)
        for plane in nixl.planes:
            if plane not in IMPLEMENTED:
                raise ConfigError(f"kv_connector_extra_config.planes names {plane}, which is not here yet; use {', '.join(IMPLEMENTED)}")
        faults = fault_spec_from_environment(environ)
        if faults:
            _with_faults([], faults)
        return cls(
            bind_host=side_channel.bind_host,
            advertised_host=side_channel.advertised_host,
            port=side_channel.port,
            secret=b"" if secret is None else secret.key,
            backends=nixl.backends,
            num_threads=nixl.num_threads,
            staging=StagingSettings(nixl.staging_piece_bytes, nixl.staging_ring_bytes),
            planes=nixl.planes or IMPLEMENTED,
            faults=faults,
        )

    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return SharedMemory.allocate(size_bytes)

    def data_planes(self, memory: CacheMemory | None) -> Sequence[DataPlane]:
        """In the order the operator pinned, else ours. Without shared memory there is no `shm`."""
        made: list[DataPlane] = []
        for name in self.planes:
            if name == "nixl":
                reach = NetworkReach.THIS_HOST if is_loopback(self.advertised_host) else NetworkReach.ANYWHERE
                made.append(StagedNixlDataPlane(NixlDataPlane(self.backends, self.num_threads, reach), self.staging, self.secret))
                if reach is NetworkReach.ANYWHERE and "tcp" not in self.planes and not has_fabric(self.backends, os.environ):
                    _log.warning(NIXL_OVER_TCP)
            elif name == "tcp":
                made.append(TcpDataPlane(self.bind_host, self.advertised_host))
            elif name == "cuda_ipc":
                made.append(CudaIpcDataPlane())
            elif isinstance(memory, SharedMemory):
                made.append(ShmDataPlane(memory))
        return _with_faults(made, self.faults) if self.faults else made

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        return HostBlockStore(regions)

    def staged_block_store(self, engine: Sequence[Region], mirror: Sequence[Region], memory: CacheMemory) -> BlockStore:
        if all(region.memory is MemoryKind.DRAM for region in engine):
            return HostBlockStore(mirror, HostMirror(engine, mirror))
        # Imported only where there is a device: it takes torch with CUDA.
        from kvferry.planes.cuda_mirror import CudaMirror

        return HostBlockStore(mirror, CudaMirror(engine, mirror, (memory.address, memory.size_bytes)))

    def engine_order(self, engine: Sequence[Region]) -> EngineOrder:
        devices = {region.device for region in engine if region.memory is MemoryKind.VRAM}
        if not devices:
            return HostOrder()
        from kvferry.planes.cuda_order import CudaOrder

        return CudaOrder(devices.pop())

    def control_plane(self) -> ControlPlane:
        return self._listening_on(0)

    def side_channel(self) -> ControlPlane:
        return self._listening_on(self.port)

    def _listening_on(self, port: int) -> ControlPlane:
        return ZmqControlPlane(self.bind_host, self.advertised_host, port, CurveKeys.from_secret(self.secret))


def nixl_settings(transfer: KVTransferConfig | None) -> NixlExtraConfig:
    """Those of the connector, or of the first of a MultiConnector that has some; else the defaults."""
    if transfer is None:
        return NixlExtraConfig()
    if isinstance(transfer.extra, MultiExtraConfig):
        return next((c.extra for c in transfer.extra.connectors if isinstance(c.extra, NixlExtraConfig)), NixlExtraConfig())
    return transfer.extra if isinstance(transfer.extra, NixlExtraConfig) else NixlExtraConfig()


def _with_faults(planes: Sequence[DataPlane], faults: str) -> list[DataPlane]:
    # Imported only when asked for: what breaks things on purpose is not loaded in production.
    from kvferry.planes.faulty import FaultyDataPlane, parse_faults

    spec = parse_faults(faults)
    return [FaultyDataPlane(plane, spec) for plane in planes]
