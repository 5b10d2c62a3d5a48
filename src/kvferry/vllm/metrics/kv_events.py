"""The KV events of the tiers in vLLM's format, for readers of `--kv-events-config`.

The events describe blocks as vLLM's own events for its GPU blocks do, with the same hashes,
parents, token ids and extra keys. The fields `ownership` and `locality` distinguish the tiers of
one medium.
"""

from array import array
from typing import Any

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)

from kvferry.connectors.contract import Request
from kvferry.connectors.offloading.events import BlocksStored, HashedBlocks, KVEvent
from kvferry.tiers.commands import POOL
from kvferry.vllm.translate import VllmRequestView

REMOTE_TIERS = frozenset({"object"})
"""Tiers that are never on this host. Where a folder is, kvferry does not know."""


class KVEventTranslator:
    """Describes blocks of vLLM's requests, and makes vLLM's events from kvferry's."""

    def __init__(self, kv_cache_manager: Any, block_size: int) -> None:
        self._block_size = block_size
        self._hash_block_size = kv_cache_manager.block_pool.hash_block_size
        self._groups = kv_cache_manager.kv_cache_event_metadata
        """The kind of each KV-cache group's attention, and its sliding window."""
        # vLLM's function looks into the environment for every hash, which would take a third of the
        # time of a description.
        publishes_ints = isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int)
        self._published_hash = _low_64_bits if publishes_ints else bytes

    def describe(self, request: Request, tokens: range) -> HashedBlocks | None:
        """Describe the blocks of a range of tokens; None if vLLM has not hashed them."""
        assert isinstance(request, VllmRequestView)
        theirs = request.request
        size = self._block_size
        blocks = range(tokens.start // size, tokens.stop // size)
        hashes = resolve_block_hashes(theirs.block_hashes, self._hash_block_size, size)
        if len(hashes) < blocks.stop:
            return None
        extra_keys = [
            generate_block_hash_extra_keys(theirs, block * size, (block + 1) * size, 0)[0]
            for block in blocks
        ]
        adapter = theirs.lora_request
        return HashedBlocks(
            hashes=tuple(map(self._published_hash, hashes[blocks.start : blocks.stop])),
            parent=self._published_hash(hashes[blocks.start - 1]) if blocks.start else None,
            # An array takes a small part of a list's memory.
            token_ids=array("i", theirs.all_token_ids[tokens.start : tokens.stop]),
            lora_id=adapter.adapter_id if adapter else None,
            lora_name=adapter.name if adapter else None,
            extra_keys=tuple(to_event_extra_keys(extra_keys)),
        )

    def translate(self, event: KVEvent) -> KVCacheEvent:
        blocks = event.blocks
        place = {
            "medium": MEDIUM_CPU if event.tier == POOL else MEDIUM_STORAGE,
            "locality": "REMOTE" if event.tier in REMOTE_TIERS else None,
            "ownership": None if event.tier == POOL else event.tier,
            "group_idx": event.group,
        }
        if not isinstance(event, BlocksStored):
            return BlockRemoved(block_hashes=list(blocks.hashes), **place)
        kind, sliding_window = self._groups[event.group]
        return BlockStored(
            block_hashes=list(blocks.hashes),
            parent_block_hash=blocks.parent,
            token_ids=list(blocks.token_ids),
            block_size=self._block_size,
            lora_id=blocks.lora_id,
            lora_name=blocks.lora_name,
            extra_keys=list(blocks.extra_keys),
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=sliding_window,
            **place,
        )


def _low_64_bits(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")
