"""A reader of vLLM's KV events, as a KV-aware router has it: it knows which engine's blocks are in
which medium, and refuses events that it could not use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Place:
    medium: str
    """GPU, CPU or STORAGE."""
    ownership: str | None = None
    """The tier, if the medium is STORAGE."""
    group: int = 0


@dataclass(frozen=True)
class Block:
    """Everything that an event says of one block."""

    block_hash: int
    parent: int | None
    token_ids: tuple[int, ...]
    lora: tuple[int | None, str | None]
    extra_keys: Any
    kind: str | None
    sliding_window: int | None


@dataclass
class BlockIndex:
    places: dict[Place, dict[int, Block]] = field(default_factory=dict)
    seen: dict[int, Block] = field(default_factory=dict)
    """The blocks of the GPU, also those that are gone."""
    num_removed: dict[Place, int] = field(default_factory=dict)

    def hashes(self, medium: str, ownership: str | None = None, group: int = 0) -> set[int]:
        return set(self.places.get(Place(medium, ownership, group), ()))

    def apply(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "BlockStored":
                self._store(event, _place(event))
            case "BlockRemoved":
                self._remove(event, _place(event))
            case "AllBlocksCleared":
                for place in self.places:
                    if place.medium == "GPU":
                        self.places[place].clear()

    def _store(self, event: Mapping[str, Any], place: Place) -> None:
        known = self.places.setdefault(place, {})
        for block in _blocks(event):
            if place.medium == "GPU":
                self.seen[block.block_hash] = block
            else:
                assert block.block_hash not in known, "stored twice"
                assert block.parent is None or self._knows(block.parent), "the parent is unknown"
            known[block.block_hash] = block

    def _remove(self, event: Mapping[str, Any], place: Place) -> None:
        for block_hash in event["block_hashes"]:
            gone = self.places[place].pop(block_hash, None)
            assert place.medium == "GPU" or gone is not None, "removed, but was not stored"
            self.num_removed[place] = self.num_removed.get(place, 0) + 1

    def _knows(self, block_hash: int) -> bool:
        return any(
            block_hash in blocks for place, blocks in self.places.items() if place.medium != "GPU"
        )


def _place(event: Mapping[str, Any]) -> Place:
    return Place(event["medium"], event.get("ownership"), event["group_idx"])


def _blocks(event: Mapping[str, Any]) -> list[Block]:
    size = event["block_size"]
    hashes, tokens = event["block_hashes"], tuple(event["token_ids"])
    extra_keys = event.get("extra_keys") or [None] * len(hashes)
    if event["medium"] == "GPU" and len(tokens) > size * len(hashes):
        # vLLM leaves out blocks of sliding windows that no request can use, but not their tokens.
        return []
    assert len(tokens) == size * len(hashes)
    parents = [event["parent_block_hash"], *hashes]
    return [
        Block(
            block_hash,
            parents[number],
            tokens[number * size : (number + 1) * size],
            (event["lora_id"], event["lora_name"]),
            extra_keys[number],
            event.get("kv_cache_spec_kind"),
            event.get("kv_cache_spec_sliding_window"),
        )
        for number, block_hash in enumerate(hashes)
    ]
