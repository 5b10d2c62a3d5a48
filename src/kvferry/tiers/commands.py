"""What an engine asks of a rank's offload worker, and what the worker reports. Plain data.

Commands travel in the connector's message of each step, so they are picklable: structs of msgspec
are made and pickled several times faster than dataclasses.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import msgspec

from kvferry.tiers.base import EntryKey, EntryKeys

POOL = "cpu"
"""The name of the host pool in metrics and in `Chunk.tiers`."""


class Chunk(msgspec.Struct, frozen=True):
    """The KV of one chunk in one KV-cache group, and the blocks that hold it or shall hold it."""

    key: EntryKey
    group: int
    block_ids: tuple[int, ...]
    tiers: tuple[str, ...] = ()
    """Of a store: the tiers that shall get the chunk. Of a load: the tiers in which the lookup
    found the chunk, the best first. The host pool always takes part, named or not: every chunk
    passes through it.
    """


class ChunkTable(msgspec.Struct, frozen=True):
    """Chunks as columns. A step may carry hundreds of chunks, and the engine's thread would spend
    several times as long on building and pickling one object for each.
    """

    blocks_per_chunk: int
    keys: EntryKeys
    groups: tuple[int, ...]
    """One for each chunk, or one for all."""
    block_ids: Sequence[int]
    """`blocks_per_chunk` ids for each chunk."""
    tiers: tuple[tuple[str, ...], ...]
    """One for each chunk, or one for all."""

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Chunk]:
        size = self.blocks_per_chunk
        assert {len(self.groups), len(self.tiers)} <= {1, len(self)}
        columns = zip(self.keys, cycle(self.groups), cycle(self.tiers), strict=False)
        for number, (key, group, tiers) in enumerate(columns):
            block_ids = tuple(self.block_ids[number * size : (number + 1) * size])
            yield Chunk(key, group, block_ids, tiers)


Chunks = tuple[Chunk, ...] | ChunkTable


# -- commands --


class StoreChunks(msgspec.Struct, frozen=True):
    """Store chunks whose blocks are full. The blocks stay as they are until `StoresCopied` is
    reported, or `VoidStores` is sent.
    """

    request: str
    chunks: Chunks
    """In the order of the prompt: under pressure, the end is left out."""
    number: int = 0
    """Ascending over all stores of an engine."""


class VoidStores(msgspec.Struct, frozen=True):
    """The engine may overwrite blocks of these chunks from now on: a copy that has not ended must
    not be stored. An empty tuple stands for all chunks of the request.
    """

    request: str
    keys: tuple[EntryKey, ...] = ()


class LoadChunks(msgspec.Struct, frozen=True):
    """Fill the blocks of these chunks, and report `LoadEnded`."""

    request: str
    chunks: Chunks


class CancelLoad(msgspec.Struct, frozen=True):
    """The request has ended: report `LoadEnded` as soon as nothing writes into its blocks."""

    request: str


class DropAll(msgspec.Struct, frozen=True):
    """Forget everything in this rank's part of the host pool, and store nothing that is being
    copied.
    """


OffloadCommand = StoreChunks | VoidStores | LoadChunks | CancelLoad | DropAll


# -- events --


class LoadEnded(msgspec.Struct, frozen=True):
    """The blocks of a load are filled, or the load has failed for the given reason. Nothing writes
    into the blocks any more.
    """

    request: str
    reason: str = ""
    missing: tuple[EntryKey, ...] = ()
    """The chunks that no tier could provide."""
    seconds: float = 0.0
    """How long the load took, also if that was too long; 0 if it failed for another reason."""
    bytes_by_tier: dict[str, int] = msgspec.field(default_factory=dict)
    """How much came from each tier. A load that took too long counts what was still to come."""


class StoresCopied(msgspec.Struct, frozen=True):
    """No copy reads the blocks of any store up to this number any more."""

    number: int


class ContentsChanged(msgspec.Struct, frozen=True):
    """What the tiers of this rank hold, by tier, compared with the last report."""

    stored: Mapping[str, tuple[EntryKey, ...]] = msgspec.field(default_factory=dict)
    removed: Mapping[str, tuple[EntryKey, ...]] = msgspec.field(default_factory=dict)
    is_cleared: bool = False
    """Of everything that earlier reports named, the engine can use nothing any more."""


TierCounts = dict[str, dict[str, float]]
"""Counters by tier and name."""


class TiersCounted(msgspec.Struct, frozen=True):
    """What has been counted since the last report. No request waits for it."""

    counts: TierCounts


OffloadEvent = LoadEnded | StoresCopied | ContentsChanged | TiersCounted
