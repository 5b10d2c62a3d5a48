"""What the scheduler side of `OffloadingConnector` knows of a request. Plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.connectors.contract import Request
from kvferry.connectors.offloading.events import KVEventLog
from kvferry.connectors.offloading.lookup import Hit
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.tiers.base import EntryKey, EntryKeys
from kvferry.tiers.commands import ChunkTable
from kvferry.tiers.keys import KeyChain
from kvferry.types import BlockIds

ChunkTiers = Callable[[int, int], tuple[str, ...]]
"""The tiers of the chunk with this index in this group."""


@dataclass(slots=True)
class LoadState:
    """What was found for a request, and how often it may still load."""

    num_loads_left: int = 0
    num_loading_tokens: int = 0
    """How many tokens the load has that has not ended; 0 if there is none."""
    num_local_tokens: int = 0
    """How many tokens the engine had when it last asked."""
    hit: Hit | None = None
    max_chunks: int | None = None
    """No more chunks than this can be loaded: the next one was missing."""
    is_counted: bool = False
    """Whether the statistics contain the request's lookup."""


@dataclass(slots=True)
class StoreState:
    """Which chunks of a request have been offered to the workers, and which may be copied now."""

    num_offered: int = 0
    """How many leading chunks were offered since the request last started."""
    num_counted: int = 0
    """How many leading chunks were counted as used."""
    last_store: int = 0
    """The number of the request's last store; 0 if there was none since the last start."""
    uncopied_from: int = 0
    """While `last_store` is not copied: the first chunk whose blocks a copy may still read."""


@dataclass(slots=True)
class TrackedRequest:
    """A request whose KV can be loaded and stored."""

    request_id: str
    chain: KeyChain
    num_prompt_tokens: int
    blocks_per_chunk: int
    has_holes: bool
    """Whether block tables may have holes: blocks leave them if a group has local attention."""
    load: LoadState = field(default_factory=LoadState)
    store: StoreState = field(default_factory=StoreState)
    is_outdated: bool = False
    """The keys may not fit the KV any more: the request loads and stores nothing."""
    described_by: tuple[KVEventLog, Request] | None = None
    """Set if KV events describe the request's blocks."""

    def describe(self, span: range) -> None:
        """Describe chunks that tiers may hold soon, for KV events."""
        if self.described_by is not None:
            event_log, request = self.described_by
            event_log.note_request(request, self.chain.keys, span)

    def chunk_table(
        self, tables: BlockIds, span: range, tiers: ChunkTiers | tuple[str, ...]
    ) -> ChunkTable:
        """The chunks of a span, in all groups that have blocks for them, in the order of the
        prompt. Leaves out chunks without tiers.
        """
        keys, size = self.chain.keys, self.blocks_per_chunk
        if len(tables) == 1 and not callable(tiers):
            blocks = tables[0][span.start * size : span.stop * size]
            if len(blocks) == len(span) * size and not (self.has_holes and NO_BLOCK in blocks):
                # The usual case, without a loop.
                return ChunkTable(size, keys[0][span.start : span.stop], (0,), blocks, (tiers,))
        rows: list[tuple[EntryKey, int, tuple[str, ...]]] = []
        block_ids: list[int] = []
        for index in span:
            for group, table in enumerate(tables):
                blocks = tuple(table[index * size : (index + 1) * size])
                of_chunk = tiers(group, index) if callable(tiers) else tiers
                if of_chunk and len(blocks) == size and NO_BLOCK not in blocks:
                    rows.append((keys[group][index], group, of_chunk))
                    block_ids += blocks
        chosen_keys, groups, chunk_tiers = zip(*rows, strict=True) if rows else ((), (), ())
        chosen = EntryKeys(b"".join(chosen_keys))
        return ChunkTable(size, chosen, groups, tuple(block_ids), chunk_tiers)
