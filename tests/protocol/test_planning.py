"""Plans cover each needed byte exactly once and no other; what cannot be planned is refused by name."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout, RegionInfo
from kvferry.protocol.planning import Geometry, check_geometry, geometry_from_layout, plan_read
from kvferry.protocol.ranks import can_divide, heads_of, visits
from kvferry.protocol.tickets import HOLE
from kvferry.types import KVLayout, Region


def make_geometry(num_blocks: int = 12, block_size: int = 4, regions: int = 3, gap: int = 0, base: int = 0) -> Geometry:
    stride = 64 + gap
    made = tuple(Region(f"layer.{i}", base + i * num_blocks * stride, 64, stride, num_blocks) for i in range(regions))
    return Geometry(0, 1, block_size, num_blocks, KVLayout.HND, 2, 8, made, 2)


def make_layout(**changes: object) -> RankLayout:
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "block_size": 4,
        "num_blocks": 12,
        "layout": "HND",
        "num_kv_heads": 2,
        "head_dim": 8,
        "control_address": "tcp://h:1",
        "regions": [RegionInfo("layer.0", 4096, 64, 64, 12, "DRAM", 0)],
        "offers": [],
        "total_kv_heads": 2,
    }
    return RankLayout(**(fields | changes))  # type: ignore[arg-type]


@given(st.data())
def test_every_needed_byte_is_covered_once_and_no_other(data: st.DataObject) -> None:
    local = make_geometry(gap=data.draw(st.sampled_from([0, 16])))
    remote = make_geometry(num_blocks=20, gap=data.draw(st.sampled_from([0, 32])))
    length = data.draw(st.integers(1, 12))
    ours = data.draw(st.permutations(range(12)))[:length]
    theirs = data.draw(st.permutations(range(20)))[:length]
    for hole in data.draw(st.sets(st.integers(0, length - 1))):
        ours[hole] = HOLE
        theirs[hole] = data.draw(st.sampled_from([HOLE, theirs[hole]]))
    end = data.draw(st.integers(1, length * 4))
    first = data.draw(st.integers(0, (end - 1) // 4)) * 4
    written = [np.zeros(region.size_bytes, dtype=np.int64) for region in local.regions]
    pairs = [{} for _ in local.regions]  # type: list[dict[int, int]]
    for pieces in plan_read(local, remote, local.heads, [ours], [theirs], range(first, end)):
        for to, source in zip(pieces.local_offsets, pieces.remote_offsets, strict=True):
            written[pieces.local_region][to : to + pieces.piece_bytes] += 1
            pairs[pieces.local_region][int(to)] = int(source)
    for region, (counts, pair) in enumerate(zip(written, pairs, strict=True)):
        needed = {
            ours[i] * local.regions[region].stride_bytes: theirs[i] * remote.regions[region].stride_bytes
            for i in range(first // 4, -(-end // 4))
            if ours[i] != HOLE
        }
        assert pair == needed
        assert counts.sum() == 64 * len(needed)
        assert counts.max() <= 1


def test_nothing_missing_is_nothing_to_move() -> None:
    assert plan_read(make_geometry(), make_geometry(), range(2), [[1]], [[2]], range(4, 4)) == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([[0, 1]], [[0, 12]]),
        ([[0, 1]], [[0, -1]]),
        ([[0, 1]], [[0]]),
        ([[0]], [[0, 1]]),
        ([], [[0, 1]]),
        ([[0, 1]], []),
        ([[0, 99]], [[0, 1]]),
    ],
)
def test_block_lists_are_checked_before_any_address_is_computed(ours: list[list[int]], theirs: list[list[int]]) -> None:
    with pytest.raises(RemoteProtocolError):
        plan_read(make_geometry(), make_geometry(), range(2), ours, theirs, range(0, 8))


def test_equal_geometries_fit() -> None:
    check_geometry("p", make_geometry(), make_geometry(num_blocks=99, gap=8, base=1 << 40))


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (make_geometry(block_size=8), "block_size"),
        (make_geometry(regions=2), "regions"),
        (replace(make_geometry(), total_kv_heads=4), "total_kv_heads"),
        (replace(make_geometry(), tp_size=2), "num_kv_heads"),
        (replace(make_geometry(), tp_size=3), "tp_size"),
        (replace(make_geometry(), tp_size=2, num_kv_heads=1), "tp_size"),
        (replace(make_geometry(), layout=KVLayout.NHD), "kv_cache_layout"),
    ],
)
def test_a_difference_is_refused_by_name_with_both_values(other: Geometry, field: str) -> None:
    with pytest.raises(IncompatiblePeer, match=f"{field}: ours .*, theirs .*") as caught:
        check_geometry("p", make_geometry(), other)
    assert field in caught.value.differences


def test_a_layout_from_the_wire_becomes_a_geometry() -> None:
    assert geometry_from_layout(make_layout()).regions == (Region("layer.0", 4096, 64, 64, 12),)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "XYZ"},
        {"tp_rank": 1},
        {"tp_rank": -1},
        {"tp_size": 0},
        {"block_size": 0},
        {"num_blocks": -1},
        {"regions": []},
        {"regions": [RegionInfo("l", 0, 64, 32, 12, "DRAM", 0)]},
        {"regions": [RegionInfo("l", 0, 0, 32, 12, "DRAM", 0)]},
        {"regions": [RegionInfo("l", -1, 64, 64, 12, "DRAM", 0)]},
        {"regions": [RegionInfo("l", 2**64 - 1, 64, 64, 12, "DRAM", 0)]},
        {"regions": [RegionInfo("l", 0, 64, 64, 13, "DRAM", 0)]},
        {"regions": [RegionInfo("l", 0, 64, 64, 12, "DRAM", -1)]},
        {"regions": [RegionInfo("l", 0, 64, 64, 12, "VRAM", 2**40)]},
        {"regions": [RegionInfo("l", 0, 64, 64, 12, "TAPE", 0)]},
        {"regions": [RegionInfo("l", 0, 64, 64, 12, "DRAM", 0, -1)]},
    ],
)
def test_a_senseless_layout_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        geometry_from_layout(make_layout(**changes))


HEAD_BYTES, LAYERS = 4, 2


class Cache:
    """One rank's cache in memory: blocks with a gap between them, cut into `parts`, heads and tokens in the order of `layout`."""

    def __init__(self, rank: int, size: int, total: int, layout: KVLayout, parts: int, num_blocks: int, gap: int) -> None:
        heads = heads_of(rank, size, total)
        block_bytes = len(heads) * 4 * HEAD_BYTES
        self.layout, self.parts = layout, parts
        self.memory = np.zeros((LAYERS, num_blocks, block_bytes + gap), dtype=np.uint8)
        self.blocks = self.memory[:, :, :block_bytes]
        runs = parts if layout is KVLayout.HND else 4
        regions = tuple(Region(f"layer.{i}", 0, block_bytes, block_bytes + gap, num_blocks, head_runs=runs) for i in range(LAYERS))
        self.geometry = Geometry(rank, size, 4, num_blocks, layout, len(heads), 8, regions, total)

    def fill(self, content: npt.NDArray[np.uint8]) -> None:
        """`content` is [layers, blocks, all heads, tokens, bytes]."""
        own = content[:, :, self.geometry.heads]
        layers, blocks, heads, tokens, size = own.shape
        cut = own.reshape(layers, blocks, heads, self.parts, tokens // self.parts, size)
        order = (0, 1, 3, 2, 4, 5) if self.layout is KVLayout.HND else (0, 1, 3, 4, 2, 5)
        self.blocks[:] = cut.transpose(order).reshape(layers, blocks, -1)


def read_as_planned(into: Cache, source: Cache, heads: range, ours: list[int], theirs: list[int], tokens: range) -> npt.NDArray[np.uint8]:
    """Do what the plan says, and count how often each byte was written."""
    counts = np.zeros_like(into.memory)
    for pieces in plan_read(into.geometry, source.geometry, heads, [ours], [theirs], tokens):
        flat, there, count = (array[pieces.local_region].reshape(-1) for array in (into.memory, source.memory, counts))
        for to, at in zip(pieces.local_offsets, pieces.remote_offsets, strict=True):
            assert 0 <= at <= at + pieces.piece_bytes <= there.size
            flat[to : to + pieces.piece_bytes] = there[at : at + pieces.piece_bytes]
            count[to : to + pieces.piece_bytes] += 1
    return counts


@given(st.data())
def test_any_two_tp_sizes_move_each_needed_byte_once_to_its_place_and_no_other(data: st.DataObject) -> None:
    total = data.draw(st.sampled_from([1, 2, 3, 4, 6, 8]), "heads")
    fitting = [size for size in (1, 2, 3, 4, 6, 8) if can_divide(total, size)]
    size, remote_size = data.draw(st.sampled_from(fitting), "our ranks"), data.draw(st.sampled_from(fitting), "their ranks")
    layout, parts = data.draw(st.sampled_from(list(KVLayout))), data.draw(st.sampled_from([1, 2]), "parts")
    ours, theirs = data.draw(st.permutations(range(6)))[:4], data.draw(st.permutations(range(9)))[:4]
    first = data.draw(st.integers(0, 3)) * 4
    tokens = range(first, data.draw(st.integers(first + 1, 16)))
    content = np.random.default_rng(total).integers(1, 256, (LAYERS, 9, total, 4, HEAD_BYTES), dtype=np.uint8)
    producer = [Cache(rank, remote_size, total, layout, parts, 9, gap=8) for rank in range(remote_size)]
    for cache in producer:
        cache.fill(content)
    needed = range(first // 4, -(-tokens.stop // 4))
    for rank in range(size):
        got, wanted = (Cache(rank, size, total, layout, parts, 6, gap=data.draw(st.sampled_from([0, 4]))) for _ in range(2))
        moved = np.zeros((LAYERS, 6, total, 4, HEAD_BYTES), dtype=np.uint8)
        for index in needed:
            moved[:, ours[index]] = content[:, theirs[index]]
        wanted.fill(moved)
        counts = np.zeros_like(got.memory)
        for visit in visits(rank, size, remote_size, total):
            check_geometry("p", got.geometry, producer[visit.rank].geometry)
            counts += read_as_planned(got, producer[visit.rank], visit.heads, ours, theirs, tokens)
        assert (got.blocks == wanted.blocks).all()
        assert (counts[:, :, : got.blocks.shape[2]] == (wanted.blocks > 0)).all()
        assert not counts[:, :, got.blocks.shape[2] :].any()


def test_equal_sizes_move_whole_blocks() -> None:
    ours, theirs = (Cache(1, 2, 4, KVLayout.NHD, 1, 8, gap=0).geometry for _ in range(2))
    plan = plan_read(ours, theirs, ours.heads, [[0, 5]], [[3, 1]], range(8))
    assert [(p.piece_bytes, list(p.local_offsets), list(p.remote_offsets)) for p in plan] == [(32, [0, 160], [96, 32])] * LAYERS


def test_with_the_heads_outside_a_range_of_them_is_one_piece_per_block() -> None:
    whole = Cache(0, 1, 4, KVLayout.HND, 1, 8, gap=0).geometry
    half = Cache(1, 2, 4, KVLayout.HND, 1, 8, gap=0).geometry
    plan = plan_read(half, whole, half.heads, [[0, 5]], [[3, 1]], range(8))
    assert [(p.piece_bytes, list(p.local_offsets), list(p.remote_offsets)) for p in plan] == [(32, [0, 160], [224, 96])] * LAYERS


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": KVLayout.NHD}, "kv_cache_layout"),
        ({"parts": 2}, "head_runs"),
        ({"size": 1, "total": 6}, "total_kv_heads"),
    ],
)
def test_unequal_sizes_are_planned_only_if_blocks_are_cut_alike(changes: dict[str, Any], field: str) -> None:
    shape: dict[str, Any] = {"rank": 0, "size": 1, "total": 4, "layout": KVLayout.HND, "parts": 1, "num_blocks": 8, "gap": 0}
    local, remote = Cache(0, 2, 4, KVLayout.HND, 1, 8, 0), Cache(**(shape | changes))
    with pytest.raises(IncompatiblePeer, match=f"{field}: ours .*, theirs .*"):
        check_geometry("p", local.geometry, remote.geometry)


def test_regions_that_are_no_multiple_of_a_head_are_refused_though_they_would_do_for_equal_sizes() -> None:
    local = Cache(0, 1, 2, KVLayout.HND, 1, 8, 0).geometry
    odd = tuple(replace(region, block_bytes=33, stride_bytes=33) for region in local.regions)
    check_geometry("p", replace(local, regions=odd), replace(local, regions=odd))
    remote = replace(Cache(0, 2, 2, KVLayout.HND, 1, 8, 0).geometry, regions=tuple(replace(r, block_bytes=16) for r in local.regions))
    with pytest.raises(IncompatiblePeer, match="tp_size: ours 1, theirs 2"):
        check_geometry("p", replace(local, regions=odd), remote)
