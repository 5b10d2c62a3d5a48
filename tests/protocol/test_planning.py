"""Plans cover each needed byte exactly once and no other; what cannot be planned is refused by name."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout, RegionInfo
from kvferry.protocol.planning import Geometry, check_geometry, geometry_from_layout, plan_read, source_ranks
from kvferry.types import KVLayout, Region


def make_geometry(num_blocks: int = 12, block_size: int = 4, regions: int = 3, gap: int = 0, base: int = 0) -> Geometry:
    stride = 64 + gap
    made = tuple(Region(f"layer.{i}", base + i * num_blocks * stride, 64, stride, num_blocks) for i in range(regions))
    return Geometry(0, 1, block_size, num_blocks, KVLayout.HND, 2, 8, made)


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
    }
    return RankLayout(**(fields | changes))  # type: ignore[arg-type]


@given(st.data())
def test_every_needed_byte_is_covered_once_and_no_other(data: st.DataObject) -> None:
    local = make_geometry(gap=data.draw(st.sampled_from([0, 16])))
    remote = make_geometry(num_blocks=20, gap=data.draw(st.sampled_from([0, 32])))
    length = data.draw(st.integers(1, 12))
    ours = data.draw(st.permutations(range(12)))[:length]
    theirs = data.draw(st.permutations(range(20)))[:length]
    end = data.draw(st.integers(1, length * 4))
    first = data.draw(st.integers(0, (end - 1) // 4)) * 4
    written = [np.zeros(region.size_bytes, dtype=np.int64) for region in local.regions]
    pairs = [{} for _ in local.regions]  # type: list[dict[int, int]]
    for pieces in plan_read(local, remote, [ours], [theirs], range(first, end)):
        for to, source in zip(pieces.local_offsets, pieces.remote_offsets, strict=True):
            written[pieces.local_region][to : to + pieces.piece_bytes] += 1
            pairs[pieces.local_region][int(to)] = int(source)
    for region, (counts, pair) in enumerate(zip(written, pairs, strict=True)):
        needed = {
            ours[i] * local.regions[region].stride_bytes: theirs[i] * remote.regions[region].stride_bytes
            for i in range(first // 4, -(-end // 4))
        }
        assert pair == needed
        assert counts.sum() == 64 * len(needed)
        assert counts.max() == 1


def test_nothing_missing_is_nothing_to_move() -> None:
    assert plan_read(make_geometry(), make_geometry(), [[1]], [[2]], range(4, 4)) == []


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
        plan_read(make_geometry(), make_geometry(), ours, theirs, range(0, 8))


def test_equal_geometries_fit() -> None:
    check_geometry("p", make_geometry(), make_geometry(num_blocks=99, gap=8, base=1 << 40))


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (make_geometry(block_size=8), "block_size"),
        (make_geometry(regions=2), "regions"),
        (replace(make_geometry(), tp_size=2), "tp_size"),
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


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_every_remote_rank_is_read_and_each_local_rank_reads_its_share(local_size: int, remote_size: int) -> None:
    read = [source_ranks(rank, local_size, remote_size) for rank in range(local_size)]
    assert {rank for ranks in read for rank in ranks} == set(range(remote_size))
    assert all(len(ranks) == max(1, remote_size // local_size) for ranks in read)
