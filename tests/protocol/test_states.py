"""Tests plans for caches that hold states: exactly the state after the last token moves, each part
divided by its own heads, whatever TP and block sizes the sides have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout, decode_layout, encode_layout
from kvferry.protocol.planning.axes import dense_axes
from kvferry.protocol.planning.geometry import (
    Geometry,
    check_geometry,
    geometry_from_layout,
)
from kvferry.protocol.planning.heads import heads_of, rank_mappings
from kvferry.protocol.planning.plan import check_prefill, plan_permutations, plan_read
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import AxisKind, KVLayout, Region

NUM_BLOCKS = 6
KV_HEADS, KV_ITEM = 2, 4
PARTS = {"conv.x": (4, 6), "conv.B": (2, 3), "conv.C": (1, 5), "recurrent": (4, 8)}
"""The parts of a state: heads over all ranks, and bytes per head."""
PAGE = 256


@dataclass
class Side:
    """One rank: a region of KV for each token, and the parts of a state behind each other in pages
    of their own.
    """

    tp_rank: int
    tp_size: int
    block_size: int
    seed: int
    memory: np.ndarray[Any, np.dtype[np.uint8]] = field(init=False)
    geometry: Geometry = field(init=False)

    def __post_init__(self) -> None:
        kv_heads = len(heads_of(self.tp_rank, self.tp_size, KV_HEADS))
        kv_bytes = kv_heads * self.block_size * KV_ITEM
        rng = np.random.default_rng([self.seed, self.tp_rank])
        self.memory = rng.integers(0, 256, NUM_BLOCKS * (kv_bytes + PAGE), np.uint8)
        start = self.memory.ctypes.data
        kv_axes = [(AxisKind.HEAD, kv_heads), (AxisKind.TOKEN, self.block_size)]
        regions = [
            Region(
                "attn",
                start,
                kv_bytes,
                kv_bytes,
                NUM_BLOCKS,
                axes=dense_axes(kv_axes, KV_ITEM),
            )
        ]
        address = start + NUM_BLOCKS * kv_bytes
        for name, (total, size) in PARTS.items():
            heads = len(heads_of(self.tp_rank, self.tp_size, total))
            axes = dense_axes([(AxisKind.HEAD, heads)], size)
            regions.append(
                Region(
                    name,
                    address,
                    heads * size,
                    PAGE,
                    NUM_BLOCKS,
                    group=1,
                    axes=axes,
                    state_heads=total,
                )
            )
            address += heads * size
        self.geometry = Geometry(
            self.tp_rank,
            self.tp_size,
            self.block_size,
            NUM_BLOCKS,
            KVLayout.HND,
            kv_heads,
            KV_ITEM // 2,
            tuple(regions),
            KV_HEADS,
        )

    def part(self, name: str, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return a view, [heads, bytes], of one part of the state in a block."""
        region = next(each for each in self.geometry.regions if each.name == name)
        first = region.address - self.memory.ctypes.data + block * region.stride_bytes
        return self.memory[first : first + region.block_bytes].reshape(-1, PARTS[name][1])


def share_state(sides: Sequence[Side], block: int) -> dict[str, Any]:
    """Give all ranks their share of one state, and return the whole state."""
    rng = np.random.default_rng(7)
    state = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in PARTS.items()}
    for side in sides:
        for name, (total, _) in PARTS.items():
            heads = heads_of(side.tp_rank, side.tp_size, total)
            side.part(name, block)[:] = state[name][heads.start : heads.stop]
    return state


def read_all(local: Side, remotes: Sequence[Side], ours: Any, theirs: Any, tokens: range) -> int:
    """Execute the plans against all ranks; return the number of bytes moved."""
    moved = 0
    for mapping in rank_mappings(
        local.tp_rank, local.tp_size, remotes[0].tp_size, *local.geometry.head_counts
    ):
        remote = remotes[mapping.rank]
        check_geometry("p", local.geometry, remote.geometry)
        for part in plan_read(local.geometry, remote.geometry, ours, theirs, tokens):
            here, there = (
                side.geometry.regions[index].address - side.memory.ctypes.data
                for side, index in ((local, part.local_region), (remote, part.remote_region))
            )
            for to, at in zip(part.local_offsets, part.remote_offsets, strict=True):
                local.memory[here + to :][: part.segment_bytes] = remote.memory[there + at :][
                    : part.segment_bytes
                ]
            moved += part.total_bytes
    return moved


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 8]),
    st.sampled_from([4, 8]),
    st.integers(1, 16),
)
def test_every_rank_gets_its_share_of_every_part(
    p_size: int, d_size: int, p_block: int, d_block: int, num_tokens: int
) -> None:
    remotes = [Side(rank, p_size, p_block, 1) for rank in range(p_size)]
    state = share_state(remotes, 5)
    p_count, d_count = -(-num_tokens // p_block), -(-num_tokens // d_block)
    theirs = [list(range(p_count)), [NO_BLOCK] * (p_count - 1) + [5]]
    ours = [list(range(d_count)), [NO_BLOCK] * (d_count - 1) + [4]]
    for rank in range(d_size):
        local = Side(rank, d_size, d_block, 2)
        read_all(local, remotes, ours, theirs, range(num_tokens))
        for name, (total, _) in PARTS.items():
            heads = heads_of(rank, d_size, total)
            assert np.array_equal(local.part(name, 4), state[name][heads.start : heads.stop]), name
        untouched = Side(rank, d_size, d_block, 2)
        for block in range(4):
            assert np.array_equal(
                local.part("recurrent", block), untouched.part("recurrent", block)
            )
        permutations = plan_permutations(
            local.geometry, [remote.geometry for remote in remotes], ours, range(num_tokens)
        )
        assert {permutation.region for permutation in permutations} <= {0}, "states need none"


def test_a_read_of_the_first_tokens_leaves_the_state_out() -> None:
    p, d = Side(0, 1, 4, 1), Side(0, 1, 4, 2)
    ours = theirs = [[0, 1, 2], [NO_BLOCK, NO_BLOCK, 3]]
    kv_bytes = 8 * KV_HEADS * KV_ITEM
    assert read_all(d, [p], ours, theirs, range(8)) == kv_bytes
    state_bytes = sum(heads * size for heads, size in PARTS.values())
    assert read_all(d, [p], ours, theirs, range(8, 10)) == kv_bytes // 2 + state_bytes


@pytest.mark.parametrize("theirs", [[NO_BLOCK, NO_BLOCK], [0, NO_BLOCK], [0, 99], [0]])
def test_a_state_that_the_producer_does_not_hold_is_refused(theirs: list[int]) -> None:
    p, d = Side(0, 1, 4, 1), Side(0, 1, 4, 2)
    with pytest.raises(RemoteProtocolError, match="the ticket's block list"):
        read_all(d, [p], [[0, 1], [NO_BLOCK, 3]], [[0, 1], theirs], range(8))


def test_states_after_another_number_of_tokens_are_refused() -> None:
    geometry = Side(0, 1, 4, 1).geometry
    check_prefill(geometry, 8, 8, 8)
    with pytest.raises(RemoteProtocolError, match="after 9 tokens, but the states after 8 tokens"):
        check_prefill(geometry, 9, 8, 8)
    without = replace(geometry, regions=geometry.regions[:1])
    check_prefill(without, 9, 8, 8)


def altered(geometry: Geometry, **changes: Any) -> Geometry:
    return replace(
        geometry, regions=(*geometry.regions[:-1], replace(geometry.regions[-1], **changes))
    )


@pytest.mark.parametrize(
    "changes",
    [{"state_heads": 8}, {"state_heads": 0}, {"block_bytes": 16, "axes": ()}, {"name": "other"}],
    ids=["heads", "not a state", "size", "name"],
)
def test_other_states_are_refused_by_name(changes: dict[str, Any]) -> None:
    ours = Side(0, 1, 4, 1).geometry
    check_geometry("p", ours, ours)
    with pytest.raises(IncompatiblePeer):
        check_geometry("p", ours, altered(ours, **changes))


def layout_of(geometry: Geometry) -> RankLayout:
    return RankLayout(
        geometry.tp_rank,
        geometry.tp_size,
        geometry.block_size,
        geometry.num_blocks,
        geometry.layout,
        geometry.num_kv_heads,
        geometry.head_dim,
        "tcp://127.0.0.1:1",
        list(geometry.regions),
        [],
        geometry.total_kv_heads,
    )


def test_states_cross_the_wire() -> None:
    geometry = Side(1, 2, 4, 1).geometry
    assert geometry_from_layout(decode_layout(encode_layout(layout_of(geometry)))) == geometry


@pytest.mark.parametrize(
    "changes",
    [
        {"state_heads": -1},
        {"state_heads": 1 << 20},
        {"state_heads": 8},
        {"axes": None},
        {"axes": dense_axes([(AxisKind.HEAD, 4), (AxisKind.TOKEN, 2)], 4)},
    ],
    ids=["negative", "too many", "other axes", "no axes", "tokens"],
)
def test_states_that_contradict_themselves_are_refused(changes: dict[str, Any]) -> None:
    geometry = altered(Side(0, 1, 4, 1).geometry, **changes)
    with pytest.raises(RemoteProtocolError, match="contradict"):
        geometry_from_layout(layout_of(geometry))
