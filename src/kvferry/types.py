"""Types that every module uses: ids, addresses, regions and their axes.

Pure: no behaviour beyond construction, comparison and derived sizes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NewType, Self

import msgspec

RequestId = NewType("RequestId", str)
"""An engine's own id of one request; unique within one epoch of the engine."""

EngineId = NewType("EngineId", str)
"""The configured or random id of an engine; only a configured id survives a restart."""

Epoch = NewType("Epoch", str)
"""Random id of one incarnation of an engine. Another epoch at the same address means a restart."""

BlockIds = Sequence[Sequence[int]]
"""Block ids of each KV-cache group, from token 0."""


class KVLayout(StrEnum):
    """Order of heads and tokens inside one block."""

    HND = "HND"
    NHD = "NHD"


class MemoryKind(StrEnum):
    DRAM = "DRAM"
    VRAM = "VRAM"


class FailurePolicy(StrEnum):
    """What the engine does with a request whose KV could not be fetched."""

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """A host and port to connect to."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The address that `HOST:PORT` or `[HOST]:PORT` names; None for other text and port 0."""
        host, _, port = text.rpartition(":")
        is_port = re.fullmatch("[0-9]{1,5}", port) is not None and 0 < int(port) < 65536
        return cls(host.strip("[]"), int(port)) if host and is_port else None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class LeaseEnd(StrEnum):
    """How a lease ended."""

    CONFIRMED = "confirmed"
    """A reader has confirmed its read."""
    RELEASED = "released"
    """The lease was released, abandoned, evicted or revoked without a confirmed read."""
    EXPIRED = "expired"
    """The lease ran out, or a reader that we wrote for stopped renewing its write grant."""
    LAPSED = "lapsed"
    """A retained turn expired, and no reader had used it."""


@dataclass(frozen=True, slots=True, order=True)
class EngineIncarnation:
    """One incarnation of one engine; tickets are issued by an incarnation."""

    engine: EngineId
    epoch: Epoch

    def __str__(self) -> str:
        return f"{self.engine}/{self.epoch}"


@dataclass(frozen=True, slots=True, order=True)
class PeerId:
    """One rank of one incarnation of an engine; data transports connect to a rank."""

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
    """Where to send the reply to a frame: to an inbound connection, or to an address we dialled."""

    identity: bytes
    dialled: str = ""


class AxisKind(StrEnum):
    LAYER = "layer"
    TOKEN = "token"
    HEAD = "head"


class Axis(msgspec.Struct, frozen=True, array_like=True):
    """One dimension of a block: `count` elements of one kind, `stride_bytes` apart."""

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
    """The axes of layers, tokens and heads in a block, outermost first.

    Every index of the axes holds `item_bytes` bytes. Axes with one element are left out. None means
    that the axes are unknown, so that only whole blocks can be moved.
    """
    layers: tuple[str, ...] = ()
    """The layers that share the region's blocks, in the order of the layer axis. Empty means one
    layer, which the region is named after.
    """
    state_heads: int = 0
    """Nonzero if a block holds the state of a whole sequence (a state-space or linear-attention
    layer) instead of KV per token: the number of heads of that state over all ranks.
    """

    @property
    def is_state(self) -> bool:
        return self.state_heads > 0

    @property
    def layer_names(self) -> tuple[str, ...]:
        return self.layers or (self.name,)

    def count(self, kind: AxisKind) -> int:
        """Return how many elements of a kind a block holds; meaningful only with known axes."""
        return prod(axis.count for axis in self.axes or () if axis.kind is kind)

    @property
    def item_bytes(self) -> int:
        """Bytes at one index of the axes; the whole block if the axes are unknown."""
        return self.block_bytes // prod(axis.count for axis in self.axes or ())

    @property
    def size_bytes(self) -> int:
        return (
            (self.num_blocks - 1) * self.stride_bytes + self.block_bytes if self.num_blocks else 0
        )
