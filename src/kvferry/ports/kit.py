"""What a composition root hands down to an engine: the makers of planes.

Engines and connectors never import a plane; they get this. It must be picklable, because worker processes are spawned with it.
"""

from collections.abc import Sequence
from typing import Protocol

from kvferry.ports.block_store import BlockStore
from kvferry.ports.control import ControlPlane
from kvferry.ports.data import DataPlane
from kvferry.ports.memory import CacheMemory
from kvferry.ports.order import EngineOrder
from kvferry.types import Region

__all__ = ["PlaneKit"]


class PlaneKit(Protocol):
    def allocate_cache(self, size_bytes: int) -> CacheMemory:
        """Memory for a worker's KV cache that as many planes as possible can carry."""

    def data_planes(self, memory: CacheMemory | None) -> Sequence[DataPlane]:
        """Fresh, unregistered data planes in order of preference."""

    def block_store(self, regions: Sequence[Region]) -> BlockStore:
        """What rearranges the blocks of a worker's registered regions."""

    def staged_block_store(self, engine: Sequence[Region], mirror: Sequence[Region], memory: CacheMemory) -> BlockStore:
        """The same for a staged cache: planes see `mirror`, which lies in `memory` (of this kit) and follows the engine's regions."""

    def engine_order(self, engine: Sequence[Region]) -> EngineOrder:
        """When what an engine with these regions has asked for is done."""

    def control_plane(self) -> ControlPlane:
        """A worker's control plane, bound to a free port of the advertised interface."""

    def side_channel(self) -> ControlPlane:
        """The scheduler's side channel, bound to the configured port."""
