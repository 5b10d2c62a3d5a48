"""Chooses and makes the transports of an engine: the only place that knows all implementations.

A `ConfiguredTransportKit` is plain data, so it can be pickled and sent to spawned worker processes.
The caller owns every transport, store and memory that the kit makes, and closes it.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvferry.config import (
    ClusterSecret,
    KVTransferConfig,
    MooncakeExtraConfig,
    NixlExtraConfig,
    P2pNcclExtraConfig,
    SideChannelConfig,
    fault_spec_from_environment,
    is_loopback,
)
from kvferry.errors import ConfigError
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
from kvferry.transports.cuda_ipc.transport import CudaIpcTransport
from kvferry.transports.host_buffer.store import CpuHostBuffer, HostBlockStore
from kvferry.transports.locality import has_rdma
from kvferry.transports.mooncake.transport import MooncakeSettings, MooncakeTransport
from kvferry.transports.nixl.bounce.settings import BounceSettings
from kvferry.transports.nixl.bounce.transport import BounceNixlTransport
from kvferry.transports.nixl.transport import NetworkReach
from kvferry.transports.shm import SharedMemory, ShmTransport
from kvferry.transports.tcp.transport import TcpTransport
from kvferry.transports.torch_dist.channel import DistSettings
from kvferry.transports.zmq import CurveKeys, ZmqTransport
from kvferry.types import MemoryKind, Region

TRANSPORTS = ("shm", "cuda_ipc", "nixl", "tcp")
"""The transports, in order of preference. NIXL without RDMA declares in its offer
(`TransportOffer.near`) that it is good on one host only; between hosts `tcp` is then preferred.
"""
ON_REQUEST = ("dist", "mooncake")
"""Transports that are used only if the operator, or the connector's default, names them."""

NIXL_OVER_TCP = (
    "`transports` names nixl without tcp, and UCX has only TCP to reach other hosts from "
    "here: a peer that dies while it reads can end this process (a fault of UCX, "
    "docs/faults.md); `tcp` does not have this fault, and is faster"
)
"""Warning for an operator whose `transports` setting makes NIXL cross hosts over TCP."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConfiguredTransportKit:
    """Implements `transports.base.TransportKit` from the operator's settings."""

    bind_host: str
    advertised_host: str
    port: int
    secret: bytes = field(repr=False)
    """The cluster secret. Empty if the engine has no connector: then the engine asks the kit for
    memory only.
    """
    backends: tuple[str, ...] = ("UCX",)
    num_threads: int = 4
    """Threads of the NIXL agent."""
    bounce: BounceSettings = field(default_factory=BounceSettings)
    dist: DistSettings = field(default_factory=DistSettings)
    mooncake: MooncakeSettings = field(default_factory=MooncakeSettings)
    transports: tuple[str, ...] = TRANSPORTS
    cache_may_sleep: bool = False
    """Whether the engine may free the memory of its cache and later map other memory there."""
    faults: str = ""
    """Specification of faults that data transports inject on purpose, for negative controls."""

    @classmethod
    def from_settings(
        cls,
        side_channel: SideChannelConfig,
        secret: ClusterSecret | None,
        transfer: KVTransferConfig | None,
        environ: Mapping[str, str],
    ) -> Self:
        nixl = nixl_settings(transfer)
        for transport in nixl.transports:
            if transport not in (*TRANSPORTS, *ON_REQUEST):
                raise ConfigError(
                    f"kv_connector_extra_config.transports names {transport}, which is not "
                    f"supported yet; use {', '.join((*TRANSPORTS, *ON_REQUEST))}"
                )
        faults = fault_spec_from_environment(environ)
        if faults:
            # Parse the specification now, so that a typo stops the engine at start-up.
            _with_faults([], faults)
        return cls(
            bind_host=side_channel.bind_host,
            advertised_host=side_channel.advertised_host,
            port=side_channel.port,
            secret=b"" if secret is None else secret.key,
            backends=nixl.backends,
            num_threads=nixl.num_threads,
            bounce=BounceSettings(nixl.bounce_max_segment_bytes, nixl.bounce_buffer_bytes),
            dist=_dist_settings(transfer),
            mooncake=_mooncake_settings(nixl),
            transports=nixl.transports or TRANSPORTS,
            faults=faults,
        )

    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        return SharedMemory.allocate(size_bytes)

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        """Make the data transports in the operator's order, or in the default order. `shm` and
        `mooncake` are left out if `memory` is not shared memory.
        """
        made: list[DataTransport] = []
        for name in self.transports:
            if name == "nixl":
                made.append(self._nixl())
            elif name == "tcp":
                made.append(TcpTransport(self.bind_host, self.advertised_host))
            elif name == "dist":
                # Imported only on request: the module needs torch.
                from kvferry.transports.torch_dist.transport import DistTransport

                made.append(DistTransport(self.bind_host, self.advertised_host, self.dist))
            elif name == "cuda_ipc" and not self.cache_may_sleep:
                made.append(CudaIpcTransport())
            elif name == "shm" and isinstance(memory, SharedMemory):
                made.append(ShmTransport(memory))
            elif name == "mooncake" and isinstance(memory, SharedMemory):
                hosts = self.bind_host, self.advertised_host
                made.append(MooncakeTransport(memory, *hosts, self.mooncake))
        return _with_faults(made, self.faults) if self.faults else made

    def _nixl(self) -> DataTransport:
        reach = NetworkReach.ANYWHERE
        if is_loopback(self.advertised_host):
            reach = NetworkReach.THIS_HOST
        elif "tcp" not in self.transports and not has_rdma(self.backends, os.environ):
            _log.warning(NIXL_OVER_TCP)
        return BounceNixlTransport(
            self.bounce,
            self.secret,
            self.backends,
            self.num_threads,
            reach,
            memory_may_go=self.cache_may_sleep,
        )

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        return HostBlockStore(regions)

    def host_buffer_store(
        self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory
    ) -> BlockStore:
        if all(region.memory is MemoryKind.DRAM for region in engine):
            return HostBlockStore(host_buffer, CpuHostBuffer(engine, host_buffer))
        # Imported only for device memory: the module needs torch with CUDA.
        from kvferry.transports.host_buffer.cuda import CudaHostBuffer

        return HostBlockStore(
            host_buffer, CudaHostBuffer(engine, host_buffer, (memory.address, memory.size_bytes))
        )

    def row_copier(self, regions: Sequence[Region]) -> RowCopier:
        if all(region.memory is MemoryKind.DRAM for region in regions):
            return CpuRowCopier(regions)
        # Imported only for device memory: the module needs torch with CUDA.
        from kvferry.transports.copy.cuda_rows import CudaRowCopier

        return CudaRowCopier(regions)

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        devices = {region.device for region in engine if region.memory is MemoryKind.VRAM}
        if not devices:
            return HostStream()
        # Imported only for device memory, as above.
        from kvferry.transports.copy.cuda import CudaEngineStream

        return CudaEngineStream(devices.pop())

    def control_transport(self) -> ControlTransport:
        return self._listening_on(0)

    def side_channel(self) -> ControlTransport:
        return self._listening_on(self.port)

    def _listening_on(self, port: int) -> ControlTransport:
        return ZmqTransport(
            self.bind_host, self.advertised_host, port, CurveKeys.from_secret(self.secret)
        )


def nixl_settings(transfer: KVTransferConfig | None) -> NixlExtraConfig:
    """Return the NIXL settings of the connector, or of the first connector in a MultiConnector that
    has NIXL settings; otherwise the defaults.
    """
    if transfer is None:
        return NixlExtraConfig()
    return next(
        (c.extra for c in transfer.connectors if isinstance(c.extra, NixlExtraConfig)),
        NixlExtraConfig(),
    )


def _dist_settings(transfer: KVTransferConfig | None) -> DistSettings:
    for connector in transfer.connectors if transfer is not None else ():
        if isinstance(connector.extra, P2pNcclExtraConfig):
            return DistSettings(
                host_pool_bytes=connector.extra.mem_pool_bytes,
                device_pool_bytes=int(connector.extra.kv_buffer_size),
                backend=connector.extra.backend or "gloo",
                num_channels=connector.extra.nccl_num_channels,
            )
    return DistSettings()


def _mooncake_settings(extra: NixlExtraConfig) -> MooncakeSettings:
    if not isinstance(extra, MooncakeExtraConfig):
        return MooncakeSettings()
    return MooncakeSettings(extra.mooncake_protocol, extra.num_workers, extra.device_name or "")


def _with_faults(transports: Sequence[DataTransport], faults: str) -> list[DataTransport]:
    # Imported only on request: the fault injector is not loaded in production.
    from kvferry.transports.faulty import FaultyTransport, parse_faults

    spec = parse_faults(faults)
    return [FaultyTransport(transport, spec) for transport in transports]
