"""A reader of the tiers' KV events, for tests."""

from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.offloading.events import BlocksRemoved, KVEvent


@dataclass
class Reader:
    """A router: it knows which blocks of which group are in which tier."""

    known: set[tuple[str, int, Any]] = field(default_factory=set)

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            blocks = {(event.tier, event.group, each) for each in event.blocks.hashes}
            if isinstance(event, BlocksRemoved):
                assert blocks <= self.known, "removed what was not stored"
                self.known -= blocks
            else:
                parent = event.blocks.parent
                assert parent is None or self.knows(parent), "the parent is unknown"
                assert blocks.isdisjoint(self.known), "stored twice"
                self.known |= blocks

    def knows(self, block_hash: Any) -> bool:
        return any(each == block_hash for _, _, each in self.known)
