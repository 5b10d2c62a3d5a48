"""Tests the contract's view of states, and the geometry of a cache that holds them."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.connectors.test_factory import connector_config
from tests.connectors.test_gpu_geometry import BASE, DeviceTensor

from kvferry.connectors.contract import (
    KVCacheConfig,
    KVCacheGroup,
    KVTensor,
    ParallelConfig,
    StateLayout,
)
from kvferry.connectors.geometry import geometry_of, host_buffer_bytes, host_buffer_regions
from kvferry.errors import ConfigError, IncompatiblePeer
from kvferry.protocol.planning.geometry import Geometry, check_geometry
from kvferry.protocol.tickets import NO_BLOCK

NUM_BLOCKS, BLOCK, PAGE = 4, 16, 512
STATES = KVCacheGroup(
    ("m.conv", "m.recurrent"), state=StateLayout(BLOCK, {"m.conv": 2, "m.recurrent": 4})
)
CACHE = KVCacheConfig(NUM_BLOCKS, BLOCK, (KVCacheGroup(("a",)), STATES), "HND", 2, 4, "float32")


def geometry(
    tensors: Mapping[str, KVTensor] | None = None, cache: KVCacheConfig = CACHE
) -> Geometry:
    page = PAGE // 4
    caches = {
        "a": DeviceTensor(
            (NUM_BLOCKS, 2, cache.block_size, 4), (page, 4 * cache.block_size, 4, 1), 4, BASE
        ),
        "m.conv": DeviceTensor((NUM_BLOCKS, 6, 3), (page, 3, 1), 4, BASE),
        "m.recurrent": DeviceTensor((NUM_BLOCKS, 4, 8), (page, 8, 1), 4, BASE + 72),
    }
    return geometry_of(connector_config(), cache, {**caches, **(tensors or {})})


@pytest.mark.parametrize(
    ("num_tokens", "blocks"),
    [(1, [7]), (16, [7]), (17, [NO_BLOCK, 8]), (40, [NO_BLOCK, NO_BLOCK, 9])],
)
def test_the_block_of_the_last_token_holds_the_state(num_tokens: int, blocks: list[int]) -> None:
    assert STATES.block_list([7, 8, 9], num_tokens, BLOCK) == blocks
    kept_apart = replace(STATES, state=StateLayout(4096, {}))
    assert kept_apart.block_list([7], num_tokens, BLOCK) == [*blocks[:-1], 7]


def test_a_table_that_is_too_short_has_no_state() -> None:
    assert STATES.block_list([7], 17, BLOCK) == [NO_BLOCK, NO_BLOCK]


def test_each_part_is_a_region_with_its_own_heads() -> None:
    found = {region.name: region for region in geometry().regions}
    assert [found[name].state_heads for name in ("a", "m.conv", "m.recurrent")] == [0, 2, 4]
    assert [found[name].item_bytes for name in ("m.conv", "m.recurrent")] == [36, 32]
    assert geometry().head_counts == (2, 4)


def test_a_rank_holds_a_share_of_each_part() -> None:
    config = replace(connector_config(), parallel=ParallelConfig(2, 1))
    part = DeviceTensor((NUM_BLOCKS, 2, 8), (PAGE // 4, 8, 1), 4, BASE)
    group = KVCacheGroup(("m",), state=StateLayout(BLOCK, {"m": 4}))
    cache = replace(CACHE, groups=(KVCacheGroup(()), group))
    (region,) = geometry_of(config, cache, {"m": part}).regions
    assert (region.block_bytes, region.item_bytes) == (64, 32)


def test_a_state_that_its_heads_do_not_divide_is_refused() -> None:
    odd = DeviceTensor((NUM_BLOCKS, 3, 8), (PAGE // 4, 8, 1), 4, BASE + 72)
    with pytest.raises(ConfigError, match=r"m\.conv cannot be divided into 2 heads"):
        geometry({"m.conv": DeviceTensor((NUM_BLOCKS, 3, 3), (PAGE // 4, 3, 1), 4, BASE)})
    swapped = replace(odd, shape=(NUM_BLOCKS, 4, 8), strides=(PAGE // 4, 1, 4))
    with pytest.raises(ConfigError, match=r"m\.recurrent cannot be divided into 4 heads"):
        geometry({"m.recurrent": swapped})


def test_parts_and_kv_in_the_same_pages_share_a_host_buffer() -> None:
    regions = geometry().regions
    assert host_buffer_bytes(regions) == 4096
    moved = {region.name: region for region in host_buffer_regions(regions, 1 << 20)}
    assert moved["a"].address == moved["m.conv"].address == 1 << 20
    assert moved["m.recurrent"].address == (1 << 20) + 72
    assert {region.stride_bytes for region in moved.values()} == {PAGE}


def test_a_consumer_with_larger_blocks_is_refused() -> None:
    """Its last block would be filled in part, and the rest may hold an old state."""
    larger = geometry(
        {"a": DeviceTensor((NUM_BLOCKS, 2, 32, 2), (128, 64, 2, 1), 4, BASE)},
        replace(CACHE, block_size=2 * BLOCK),
    )
    smaller = geometry({"a": DeviceTensor((NUM_BLOCKS, 2, 16, 2), (128, 32, 2, 1), 4, BASE)})
    check_geometry("p", smaller, larger)
    with pytest.raises(IncompatiblePeer, match="block_size"):
        check_geometry("p", larger, smaller)
