"""The words every other module is written in: ids, layouts, regions and addresses.

Pure: no behaviour beyond construction and comparison.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NewType

__all__ = [
    "Address",
    "Axis",
    "AxisKind",
    "BlockId",
    "EngineId",
    "EngineIncarnation",
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
"""Random id of one process incarnation of an engine. Same address, other epoch: restarted."""

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
    LAPSED = "lapsed"
    """Kept for whoever might come, and nobody did."""


@dataclass(frozen=True, slots=True, order=True)
class EngineIncarnation:
    """One process incarnation of one engine: what a ticket is issued by."""

    engine: EngineId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.engine}/{self.epoch}"


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """One worker of one life of one engine: what a data transport connects to."""

    engine: EngineId
    epoch: Epoch
    tp_rank: int

    @property
    def incarnation(self) -> EngineIncarnation:
        return EngineIncarnation(self.engine, self.epoch)

    def __str__(self) -> str:
        return f"{self.engine}/{self.epoch}/tp{self.tp_rank}"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a frame came from and a reply goes: an inbound connection's identity, or the address we
    dialled.
    """

    identity: bytes
    dialled: str = ""


class AxisKind(StrEnum):
    LAYER = "layer"
    TOKEN = "token"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of what lies in a block: `count` of its kind, each `stride_bytes` after the one
    before.
    """

    kind: AxisKind
    count: int
    stride_bytes: int


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
    axes: tuple[Axis, ...] | None = None
    """How layers, tokens and heads lie in a block, outermost first; what lies at one index is the
    same few bytes everywhere. Axes of one element are left out. None: not known, so only whole
    blocks can move.
    """
    layers: tuple[str, ...] = ()
    """The layers that share its blocks, in the order of the layer axis; empty: the one it is named
    after.
    """

    @property
    def layer_names(self) -> tuple[str, ...]:
        return self.layers or (self.name,)

    def count(self, kind: AxisKind) -> int:
        """How many of a kind a block holds. Meaningful where the axes are known."""
        return prod(axis.count for axis in self.axes or () if axis.kind is kind)

    @property
    def item_bytes(self) -> int:
        """What lies at one index of the axes; the whole block where they are not known."""
        return self.block_bytes // prod(axis.count for axis in self.axes or ())

    @property
    def size_bytes(self) -> int:
        return (
            (self.num_blocks - 1) * self.stride_bytes + self.block_bytes if self.num_blocks else 0
        )
