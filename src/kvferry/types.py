"""The words every other module is written in: ids, layouts, regions and addresses.

Pure: no behaviour beyond construction and comparison.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

__all__ = [
    "Address",
    "BlockId",
    "EngineId",
    "EngineLife",
    "Epoch",
    "FailurePolicy",
    "KVLayout",
    "LeaseEnd",
    "MemoryKind",
    "PeerId",
    "Region",
    "RequestId",
    "Route",
]

RequestId = NewType("RequestId", str)
"""An engine's own id of one request; unique within one epoch of that engine."""

EngineId = NewType("EngineId", str)
"""The configured or random id of an engine; survives a restart only when configured."""

Epoch = NewType("Epoch", str)
"""Random id of one process life of an engine. Same address, other epoch: restarted."""

BlockId = NewType("BlockId", int)


class KVLayout(StrEnum):
    """Order of heads and tokens inside one block."""

    HND = "HND"
    NHD = "NHD"


class MemoryKind(StrEnum):
    DRAM = "DRAM"
    VRAM = "VRAM"


class FailurePolicy(StrEnum):
    """What happens to a request whose KV could not be fetched."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host and port that can be dialled."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class LeaseEnd(StrEnum):
    """How a lease came to its end."""

    CONFIRMED = "confirmed"
    RELEASED = "released"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True, order=True)
class EngineLife:
    """One process life of one engine: what a ticket is issued by."""

    engine: EngineId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.engine}/{self.epoch}"


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """One worker of one life of one engine: what a data plane connects to."""

    engine: EngineId
    epoch: Epoch
    tp_rank: int

    @property
    def life(self) -> EngineLife:
        return EngineLife(self.engine, self.epoch)

    def __str__(self) -> str:
        return f"{self.engine}/{self.epoch}/tp{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a frame came from and a reply goes: an inbound connection's identity, or the address we dialled."""

    identity: bytes
    dialled: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """One registered range of KV memory: block `b` starts at `address + b * stride_bytes`."""

    name: str
    address: int
    block_bytes: int
    stride_bytes: int
    num_blocks: int
    memory: MemoryKind = MemoryKind.DRAM
    device: int = 0
    group: int = 0
    head_runs: int = 0
    """In how many runs of adjacent bytes the KV of one head lies in a block; 0: not known, so only whole blocks can move."""

    @property
    def size_bytes(self) -> int:
        return (self.num_blocks - 1) * self.stride_bytes + self.block_bytes if self.num_blocks else 0
