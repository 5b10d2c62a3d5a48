"""The KV events of the tiers: they tell KV-aware routers which blocks an engine can load. Pure.

Every rank reports which entries its tiers hold (`ContentsChanged`). A chunk is in a tier when all
ranks hold it there, and has left the tier when the first rank has lost it. An event describes the
chunk as the engine's own events describe blocks, so the log keeps a description of each chunk from
the time when a request offers or loads it.

Readers build a tree from the events: an event whose parent they do not know is lost for them. So a
chunk is announced when some tier has the chunk before it, however late that is.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.connectors.contract import Request
from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import ContentsChanged

MAX_UNHELD = 65_536
"""How many chunks that no tier holds keep their descriptions: those of stores in progress must."""


@dataclass(frozen=True, slots=True)
class HashedBlocks:
    """The blocks of a chunk, as the engine describes blocks to readers of its own KV events."""

    hashes: tuple[Any, ...]
    """One for each block."""
    parent: Any | None
    """The hash of the block before; None at the start of a prompt."""
    token_ids: Sequence[int]
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] = ()
    """One for each block: what besides the tokens went into its hash."""

    def without(self, count: int) -> "HashedBlocks":
        """All blocks but the first `count`."""
        if not count:
            return self
        size = len(self.token_ids) // len(self.hashes)
        return replace(
            self,
            hashes=self.hashes[count:],
            parent=self.hashes[count - 1],
            token_ids=self.token_ids[count * size :],
            extra_keys=self.extra_keys[count:],
        )


DescribeBlocks = Callable[[Request, range], HashedBlocks | None]
"""Describes the blocks of a request that hold this range of tokens; None if the engine cannot."""


@dataclass(frozen=True, slots=True)
class KVEvent:
    """A change of the blocks of a KV-cache group that a tier has."""

    tier: str
    group: int
    blocks: HashedBlocks


class BlocksStored(KVEvent):
    """The tier has these blocks now."""


class BlocksRemoved(KVEvent):
    """The tier does not have these blocks any more."""


@dataclass(slots=True)
class _Chunk:
    group: int
    blocks: HashedBlocks
    prefix: EntryKey
    """Stands for all tokens up to the end of the chunk, in every group."""
    parent: EntryKey | None
    """The prefix that ends before the chunk; None at the start of a prompt."""
    holders: dict[str, int] = field(default_factory=dict)
    """By tier, the ranks that hold the chunk, as a set of bits."""
    announced: set[str] = field(default_factory=set)
    """The tiers of which the readers know."""


class _SharedBlocks:
    """How many announced chunks have each block. Prompts that differ within a chunk of several
    blocks share the chunk's first blocks, and readers that do not count would lose them with the
    first chunk.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int, Any]] = Counter()

    def count(self, tier: str, group: int, blocks: HashedBlocks, by: int) -> HashedBlocks:
        """Count the blocks of a chunk (1), or no longer (-1), and return those that no other chunk
        has: all but the first.
        """
        num_shared = 0
        # No two chunks have the same last block.
        for block_hash in blocks.hashes[:-1]:
            block = (tier, group, block_hash)
            self._counts[block] += by
            if self._counts[block] > max(by, 0):
                num_shared += 1
            elif not self._counts[block]:
                del self._counts[block]
        return blocks.without(num_shared)


class KVEventLog:
    """Turns the reports of all ranks into events. Owned by the engine's thread."""

    def __init__(
        self,
        num_ranks: int,
        chunk_tokens: int,
        describe: DescribeBlocks,
        max_unheld: int = MAX_UNHELD,
    ) -> None:
        self._all_ranks = (1 << num_ranks) - 1
        self._chunk_tokens = chunk_tokens
        self._describe = describe
        self._max_unheld = max_unheld
        self._chunks: dict[EntryKey, _Chunk] = {}
        self._unheld: OrderedDict[EntryKey, None] = OrderedDict()
        """The chunks that no rank holds, the least recently offered first."""
        self._num_announced: Counter[EntryKey] = Counter()
        """By prefix: in how many tiers and groups its last chunk is announced."""
        self._waiting: dict[EntryKey, dict[tuple[EntryKey, str], None]] = {}
        """By prefix: chunks, and their tiers, that are announced once the prefix is."""
        self._shared = _SharedBlocks()
        self._events: list[KVEvent] = []

    def note_request(
        self, request: Request, keys: Sequence[Sequence[EntryKey]], span: range
    ) -> None:
        """Keep descriptions of these chunks of a request, whose keys are given by group: tiers may
        soon hold them.
        """
        for index in span:
            new = [group for group, each in enumerate(keys) if not self._is_described(each[index])]
            if not new:
                continue
            first = index * self._chunk_tokens
            blocks = self._describe(request, range(first, first + self._chunk_tokens))
            if blocks is None:
                return
            parent = keys[0][index - 1] if index else None
            for group in new:
                key = keys[group][index]
                self._chunks[key] = _Chunk(group, blocks, keys[0][index], parent)
                self._note_unheld(key)

    def note_report(self, rank: int, change: ContentsChanged) -> None:
        """Process what one rank has reported. Entries without a description are ignored."""
        if change.is_cleared:
            for key, chunk in list(self._chunks.items()):
                for tier in list(chunk.holders):
                    self._remove(rank, tier, key)
        for tier, keys in change.removed.items():
            for key in keys:
                self._remove(rank, tier, key)
        for tier, keys in change.stored.items():
            for key in keys:
                self._add(rank, tier, key)

    def clear(self) -> None:
        """Tell the readers that all chunks are gone, and forget them: the engine does not use them
        any more, wherever they are.
        """
        for chunk in self._chunks.values():
            for tier in chunk.announced:
                self._note_removed(chunk, tier)
        self._chunks.clear()
        self._unheld.clear()
        self._num_announced.clear()
        self._waiting.clear()

    def take_events(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def __len__(self) -> int:
        """The number of chunks that are described."""
        return len(self._chunks)

    # -- descriptions --

    def _is_described(self, key: EntryKey) -> bool:
        if key in self._unheld:
            self._unheld.move_to_end(key)
        return key in self._chunks

    def _note_unheld(self, key: EntryKey) -> None:
        self._unheld[key] = None
        if len(self._unheld) > self._max_unheld:
            oldest, _ = self._unheld.popitem(last=False)
            del self._chunks[oldest]

    # -- reports --

    def _add(self, rank: int, tier: str, key: EntryKey) -> None:
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        self._unheld.pop(key, None)
        chunk.holders[tier] = chunk.holders.get(tier, 0) | 1 << rank
        if chunk.holders[tier] == self._all_ranks:
            self._announce(key, tier)

    def _announce(self, key: EntryKey, tier: str) -> None:
        """Announce a chunk if its prefix is announced, and then the chunks that wait for it."""
        ready = [(key, tier)]
        while ready:
            key, tier = ready.pop()
            chunk = self._chunks[key]
            if chunk.parent is not None and not self._num_announced[chunk.parent]:
                self._waiting.setdefault(chunk.parent, {})[key, tier] = None
                continue
            chunk.announced.add(tier)
            blocks = self._shared.count(tier, chunk.group, chunk.blocks, 1)
            self._events.append(BlocksStored(tier, chunk.group, blocks))
            self._num_announced[chunk.prefix] += 1
            ready += self._waiting.pop(chunk.prefix, ())

    def _remove(self, rank: int, tier: str, key: EntryKey) -> None:
        chunk = self._chunks.get(key)
        if chunk is None or not chunk.holders.get(tier, 0) & 1 << rank:
            return
        if tier in chunk.announced:
            chunk.announced.remove(tier)
            self._note_removed(chunk, tier)
            self._num_announced[chunk.prefix] -= 1
            if not self._num_announced[chunk.prefix]:
                del self._num_announced[chunk.prefix]
        elif chunk.parent is not None and chunk.parent in self._waiting:
            waiting = self._waiting[chunk.parent]
            waiting.pop((key, tier), None)
            if not waiting:
                del self._waiting[chunk.parent]
        chunk.holders[tier] ^= 1 << rank
        if not chunk.holders[tier]:
            del chunk.holders[tier]
            if not chunk.holders:
                self._note_unheld(key)

    def _note_removed(self, chunk: _Chunk, tier: str) -> None:
        blocks = self._shared.count(tier, chunk.group, chunk.blocks, -1)
        self._events.append(BlocksRemoved(tier, chunk.group, blocks))
