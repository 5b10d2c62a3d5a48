"""Caches in plain memory for the planning tests. A test chooses the rank, the block size, the order
of heads and tokens, and whether the layers of a group share a region or have one region each.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.events import LeaseEnded
from kvferry.protocol.actions import Action, CopyToHostBuffer, Reply
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.peers import PeerSettings, PeerTable
from kvferry.protocol.planning.axes import dense_axes
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.heads import heads_of, rank_mappings
from kvferry.protocol.planning.plan import BlockPermutation, plan_permutations, plan_read
from kvferry.protocol.producer.push_writer import ProducerSettings, PushWriter
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import AxisKind, EngineId, Epoch, KVLayout, MemoryKind, Region

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """The properties in which two engines that serve the same model may differ."""

    tp_size: int = 1
    block_size: int = 4
    layout: KVLayout = KVLayout.HND
    parts: int = 1
    """The number of parts into which the attention kernel splits a block."""
    has_shared_blocks: bool = False
    """True if all layers of a group are in one region."""
    num_blocks: int = 12
    gap: int = 0
    memory: MemoryKind = MemoryKind.DRAM


@dataclass(frozen=True)
class Model:
    heads: int = 2
    layers: tuple[tuple[str, ...], ...] = (("layer.0", "layer.1"),)
    """The layer names of each group."""
    item_bytes: int = 4


@dataclass
class Cache:
    """The cache of one rank. `memory` has one array [blocks, stride] per region."""

    model: Model
    form: Form
    rank: int
    geometry: Geometry = field(init=False)
    memory: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        form, heads = self.form, heads_of(self.rank, self.form.tp_size, self.model.heads)
        regions = []
        for group, names in enumerate(self.model.layers):
            for layers in [names] if form.has_shared_blocks else [(name,) for name in names]:
                regions.append(self._region(group, layers, len(heads)))
        self.geometry = Geometry(
            self.rank,
            form.tp_size,
            form.block_size,
            form.num_blocks,
            form.layout,
            len(heads),
            8,
            tuple(regions),
            self.model.heads,
        )
        self.memory = [
            np.zeros((form.num_blocks, region.stride_bytes), np.uint8) for region in regions
        ]

    def _region(self, group: int, layers: tuple[str, ...], heads: int) -> Region:
        form, size = self.form, self.model.item_bytes
        by_head, by_token = (AxisKind.HEAD, heads), (AxisKind.TOKEN, form.block_size // form.parts)
        order = (by_head, by_token) if form.layout is KVLayout.HND else (by_token, by_head)
        axes = dense_axes(
            [(AxisKind.LAYER, len(layers)), (AxisKind.TOKEN, form.parts), *order], size
        )
        block_bytes = len(layers) * form.block_size * heads * size
        shared = layers if form.has_shared_blocks else ()
        stride = block_bytes + form.gap
        return Region(
            layers[0],
            4096,
            block_bytes,
            stride,
            form.num_blocks,
            form.memory,
            0,
            group,
            axes,
            shared,
        )

    def views(self) -> dict[str, Bytes]:
        """Map each layer to a view [blocks, heads, parts, tokens, item] of its memory, for either
        memory order. Writing to a view writes to the cache.
        """
        views = {}
        form, heads, size = self.form, self.geometry.num_kv_heads, self.model.item_bytes
        for region, memory in zip(self.geometry.regions, self.memory, strict=True):
            tokens = form.block_size // form.parts
            order = (heads, tokens) if form.layout is KVLayout.HND else (tokens, heads)
            shape = (form.num_blocks, len(region.layer_names), form.parts, *order, size)
            whole = np.lib.stride_tricks.as_strided(
                memory, shape, (region.stride_bytes, *_dense_strides(shape[1:]))
            )
            by_head = whole if form.layout is KVLayout.HND else whole.swapaxes(3, 4)
            for index, name in enumerate(region.layer_names):
                views[name] = by_head[:, index].swapaxes(1, 2)
        return views

    def tokens(self, layer: str, blocks: list[int]) -> Bytes:
        """Return a copy, [heads, tokens, item], of the tokens in these blocks; zeros for holes."""
        view = self.views()[layer]
        parts = [
            _flat(view[block]) if block != NO_BLOCK else np.zeros_like(_flat(view[0]))
            for block in blocks
        ]
        return np.concatenate(parts, axis=1)

    def fill(self, layer: str, blocks: list[int], content: Bytes) -> None:
        """Write `content`, [all heads, tokens, item], to the blocks; it may end inside a block."""
        view, size, own = self.views()[layer], self.form.block_size, content[self.geometry.heads]
        for index, block in enumerate(blocks):
            part = own[:, index * size : (index + 1) * size]
            if block != NO_BLOCK and part.shape[1]:
                whole = np.zeros((part.shape[0], size, part.shape[2]), np.uint8)
                whole[:, : part.shape[1]] = part
                view[block] = whole.reshape(view[block].shape)


def read(
    into: Cache,
    sources: list[Cache],
    ours: list[list[int]],
    theirs: list[list[int]],
    tokens: range,
    needed: list[int],
) -> list[Bytes]:
    """Execute the read plans, and return how often the reads wrote each byte of each region."""
    counts = [np.zeros_like(memory) for memory in into.memory]
    ours_is = into.geometry
    planned = rank_mappings(
        ours_is.tp_rank, ours_is.tp_size, sources[0].form.tp_size, into.model.heads
    )
    for rank_mapping in planned:
        source = sources[rank_mapping.rank]
        for segments in plan_read(ours_is, source.geometry, ours, theirs, tokens, needed):
            here, there = (
                into.memory[segments.local_region].reshape(-1),
                source.memory[segments.remote_region].reshape(-1),
            )
            for to, at in zip(segments.local_offsets, segments.remote_offsets, strict=True):
                assert 0 <= at <= at + segments.segment_bytes <= there.size
                here[to : to + segments.segment_bytes] = there[at : at + segments.segment_bytes]
                counts[segments.local_region].reshape(-1)[to : to + segments.segment_bytes] += 1
    for placement in plan_permutations(
        ours_is, [sources[rank_mapping.rank].geometry for rank_mapping in planned], ours, tokens
    ):
        put_in_order(into.memory[placement.region], placement)
    return counts


def put_in_order(memory: Bytes, placement: BlockPermutation) -> None:
    """Permute each block item by item, directly from the definition of a `BlockPermutation`."""
    flat = memory.reshape(-1)
    for offset in placement.offsets:
        arrived = flat[offset : offset + placement.block_bytes].copy()
        for index in np.ndindex(*placement.shape):
            source = int(np.dot(index, placement.arrived))
            target = int(offset + np.dot(index, placement.wanted))
            flat[target : target + placement.item_bytes] = arrived[
                source : source + placement.item_bytes
            ]


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[index + 1 :], dtype=np.int64)) for index in range(len(shape)))


def _flat(block: Bytes) -> Bytes:
    """Reshape [heads, parts, tokens, item] to [heads, tokens, item]."""
    return block.reshape(block.shape[0], -1, block.shape[-1])


def no_writers() -> PushWriter:
    """Return the `PushWriter` of a producer that no consumer gives a write grant."""
    geometry = Cache(Model(), Form(), 0).geometry
    settings = PeerSettings(
        factors=None,
        geometry=geometry,
        offers=(),
        pinned_transports=(),
        handshake_timeout_s=5,
        engine_ttl_s=3600,
    )
    return PushWriter(producer_settings(), PeerTable(settings, Outbox()), Outbox())


def producer_settings(**changes: Any) -> ProducerSettings:
    settings = ProducerSettings(
        engine=EngineId("p"),
        epoch=Epoch("e1"),
        lease_ttl_s=30,
        lease_extension_s=20,
        grant_wait_s=5,
    )
    return replace(settings, **changes)


def take_replies(outbox: Outbox) -> list[Reply]:
    """Remove the replies from an outbox and return them; the other actions stay in the outbox."""
    actions = outbox.take_actions()
    outbox.actions += [action for action in actions if not isinstance(action, Reply)]
    return [action for action in actions if isinstance(action, Reply)]


def take_actions(outbox: Outbox) -> list[Action]:
    """Remove all actions except replies from an outbox and return them; the replies stay."""
    actions = outbox.take_actions()
    outbox.actions += [action for action in actions if isinstance(action, Reply)]
    return [action for action in actions if not isinstance(action, Reply)]


def take_copies(outbox: Outbox) -> list[CopyToHostBuffer]:
    """Remove all actions except replies from an outbox; every removed action must start a copy."""
    actions = take_actions(outbox)
    copies = [action for action in actions if isinstance(action, CopyToHostBuffer)]
    assert copies == actions
    return copies


def take_ended(outbox: Outbox) -> list[LeaseEnded]:
    """Remove all events from an outbox and return the `LeaseEnded` events."""
    return [event for event in outbox.take_events() if isinstance(event, LeaseEnded)]
