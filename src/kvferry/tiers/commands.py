"""What an engine asks of a rank's offload worker, and what the worker reports. Plain data.

Commands travel in the connector's message of each step, so they are picklable.
"""

from dataclasses import dataclass, field

from kvferry.tiers.base import ObjectKey

__all__ = [
    "CancelLoad",
    "Chunk",
    "DropAll",
    "EndStores",
    "LoadChunks",
    "LoadEnded",
    "OffloadCommand",
    "OffloadEvent",
    "StoreChunks",
    "StoresEnded",
    "TierCounts",
    "VoidStores",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The KV of one chunk in one KV-cache group, and the blocks that hold it or shall hold it."""

    key: ObjectKey
    group: int
    block_ids: tuple[int, ...]
    tiers: tuple[str, ...] = ()
    """Of a store: the tiers behind the host pool that shall get the chunk. Of a load: the tiers in
    which the lookup found the chunk, the best first.
    """


# -- commands --


@dataclass(frozen=True, slots=True)
class StoreChunks:
    """Store chunks whose blocks are full. The blocks stay as they are until `StoresEnded` is
    reported or `VoidStores` is sent.
    """

    request: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class EndStores:
    """The request has finished: report `StoresEnded` when no copy reads its blocks any more."""

    request: str


@dataclass(frozen=True, slots=True)
class VoidStores:
    """The engine may overwrite blocks of these chunks from now on: a copy that has not ended must
    not be stored. An empty tuple stands for all chunks of the request.
    """

    request: str
    keys: tuple[ObjectKey, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadChunks:
    """Fill the blocks of these chunks, and report `LoadEnded`."""

    request: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class CancelLoad:
    """The request has ended: report `LoadEnded` as soon as nothing writes into its blocks."""

    request: str


@dataclass(frozen=True, slots=True)
class DropAll:
    """Forget everything in this rank's part of the host pool, and store nothing that is being
    copied.
    """


OffloadCommand = StoreChunks | EndStores | VoidStores | LoadChunks | CancelLoad | DropAll


# -- events --


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """The blocks of a load are filled, or the load has failed for the given reason. Nothing writes
    into the blocks any more.
    """

    request: str
    reason: str = ""
    missing: tuple[ObjectKey, ...] = ()
    """The chunks that no tier could provide."""
    seconds: float = 0.0
    bytes_by_tier: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoresEnded:
    """No copy reads the blocks of a finished request any more."""

    request: str


OffloadEvent = LoadEnded | StoresEnded

TierCounts = dict[str, dict[str, float]]
"""Counters by tier and name, since the last report."""
