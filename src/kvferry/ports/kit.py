"""What a composition root hands down to an engine: the makers of transports.

Engines and connectors never import a transport; they get this. It must be picklable, because worker processes are spawned with it.
"""

from collections.abc import Sequence
from typing import Protocol

from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlTransport
from kvferry.ports.data import DataTransport
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineStream
from kvferry.types import Region

__all__ = ["TransportKit"]


class TransportKit(Protocol):
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        """Memory for a worker's KV cache that as many transports as possible can carry."""

    def data_transports(self, memory: CacheMemory | None) -> Sequence[DataTransport]:
        """Fresh, unregistered data transports in order of preference."""

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        """What rearranges the blocks of a worker's registered regions."""

    def host_buffer_store(self, engine: Sequence[Region], host_buffer: Sequence[Region], memory: CacheMemory) -> BlockStore:
        """The same for a staged cache: transports see `host_buffer`, which lies in `memory` (of this kit) and follows the engine's
        regions.
        """

    def engine_stream(self, engine: Sequence[Region]) -> EngineStream:
        """When what an engine with these regions has asked for is done."""

    def control_transport(self) -> ControlTransport:
        """A worker's control transport, bound to a free port of the advertised interface."""

    def side_channel(self) -> ControlTransport:
        """The scheduler's side channel, bound to the configured port."""
