"""Tests that cache tensors become regions, and that tensors whose blocks are not contiguous are
refused at startup.
"""

from dataclasses import dataclass, replace
from math import prod

import pytest
from tests.connectors.pair import FakeDevice
from tests.connectors.test_factory import connector_config

from kvferry.connectors.contract import KVCacheConfig, KVCacheGroup, ParallelConfig
from kvferry.connectors.geometry import geometry_of
from kvferry.errors import ConfigError

LAYERS = ("layer.10", "layer.2")


@dataclass
class Shaped:
    """The metadata of a float32 tensor: its shape, and its strides in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    device: FakeDevice | None = None
    address: int = 4096

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return 4

    def stride(self, dim: int) -> int:
        return self.strides[dim] if self.strides else prod(self.shape[dim + 1 :])


def regions_of(
    tensor: Shaped, num_blocks: int = 8, names: tuple[str, ...] = LAYERS
) -> list[tuple[str, int, int, int]]:
    tensor.device = FakeDevice()
    cache = KVCacheConfig(num_blocks, 16, (KVCacheGroup(LAYERS),), "HND", 2, 8, "float32")
    regions = geometry_of(connector_config(), cache, {name: tensor for name in names}).regions
    return [(r.name, r.block_bytes, r.stride_bytes, r.num_blocks) for r in regions]


def test_layers_come_in_their_natural_order() -> None:
    assert regions_of(Shaped((8, 2, 16, 16))) == [
        ("layer.2", 2048, 2048, 8),
        ("layer.10", 2048, 2048, 8),
    ]


def test_both_orders_of_heads_and_tokens_are_whole_blocks() -> None:
    assert regions_of(Shaped((8, 2, 16, 16), (512, 16, 32, 1)))[0][1:] == (2048, 2048, 8)


def test_blocks_with_a_gap_between_them_keep_their_stride() -> None:
    assert regions_of(Shaped((8, 2, 16, 16), (1024, 256, 16, 1)))[0][1:] == (2048, 4096, 8)


def test_a_block_that_the_kernel_cuts_into_parts_is_one_block_to_us() -> None:
    assert regions_of(Shaped((16, 2, 8, 16)))[0][1:] == (2048, 2048, 8)


@pytest.mark.parametrize(
    "tensor",
    [
        Shaped((9, 2, 16, 16)),
        Shaped((8, 2, 16, 16), (512, 4096, 16, 1)),
        Shaped((16, 2, 8, 16), (512, 128, 16, 1)),
    ],
)
def test_what_is_not_adjacent_bytes_is_refused(tensor: Shaped) -> None:
    with pytest.raises(ConfigError, match="cannot be cut into 8 blocks"):
        regions_of(tensor)


HND, NHD = (8, 2, 16, 16), (8, 16, 2, 16)
HEADS, TOKENS, PART, HALF = ("head", 2), ("token", 16), ("token", 2), ("token", 8)


@pytest.mark.parametrize(
    ("tensor", "layout", "axes"),
    [
        (Shaped(HND), "HND", [HEADS, TOKENS]),
        (Shaped(NHD), "NHD", [TOKENS, HEADS]),
        (Shaped(HND, (512, 16, 32, 1)), "NHD", [TOKENS, HEADS]),
        (Shaped((16, 2, 8, 16)), "HND", [PART, HEADS, HALF]),
        (Shaped((16, 8, 2, 16)), "NHD", [TOKENS, HEADS]),
        (Shaped(HND), "NHD", None),
        (Shaped(NHD), "HND", None),
        (Shaped((8, 2, 2, 16, 8)), "HND", None),
        (Shaped((8, 16, 32)), "HND", None),
        (Shaped((24, 2, 16, 16)), "HND", None),
    ],
)
def test_what_lies_where_in_a_block_is_known_only_if_the_tensor_lies_as_its_layout_says(
    tensor: Shaped, layout: str, axes: list[tuple[str, int]] | None
) -> None:
    assert (
        axes_of(tensor, KVCacheConfig(8, 16, (KVCacheGroup(LAYERS),), layout, 2, 8, "float32"))
        == axes
    )


@pytest.mark.parametrize(
    ("tensor", "layout", "heads", "axes"),
    [
        (Shaped(HND), "HND", 2, [HEADS]),
        (Shaped(NHD), "NHD", 2, None),
        (Shaped((16, 2, 8, 16)), "HND", 2, [PART, HEADS]),
        (Shaped((8, 16, 16)), "NHD", 1, []),
    ],
)
def test_tokens_that_a_kernel_packs_in_its_own_way_are_not_told_apart(
    tensor: Shaped, layout: str, heads: int, axes: list[tuple[str, int]] | None
) -> None:
    cache = KVCacheConfig(
        8, 16, (KVCacheGroup(LAYERS),), layout, heads, 8, "float32", has_token_rows=False
    )
    assert axes_of(tensor, cache) == axes


def axes_of(tensor: Shaped, cache: KVCacheConfig) -> list[tuple[str, int]] | None:
    tensor.device = FakeDevice()
    [region] = geometry_of(connector_config(), cache, {"layer.2": tensor}).regions
    return None if region.axes is None else [(str(axis.kind), axis.count) for axis in region.axes]


def interleaved(address: int, stride: int = 1024) -> Shaped:
    """Return a layer of 2 heads and 16 tokens whose blocks alternate with another layer's."""
    return Shaped(HND, (stride, 256, 16, 1), FakeDevice(), address)


CACHE = KVCacheConfig(8, 16, (KVCacheGroup(LAYERS),), "HND", 2, 8, "float32")


def test_layers_whose_blocks_lie_right_behind_each_other_are_one_region() -> None:
    caches = {"layer.10": interleaved(4096 + 2048), "layer.2": interleaved(4096)}
    [region] = geometry_of(connector_config(), CACHE, caches).regions
    assert (region.address, region.block_bytes, region.stride_bytes, region.layer_names) == (
        4096,
        4096,
        4096,
        ("layer.2", "layer.10"),
    )
    assert [(str(axis.kind), axis.count, axis.stride_bytes) for axis in region.axes or ()] == [
        ("layer", 2, 2048),
        ("head", 2, 1024),
        ("token", 16, 64),
    ]


@pytest.mark.parametrize(
    "caches",
    [
        {"layer.10": interleaved(4096), "layer.2": interleaved(4096 + 2048)},
        {"layer.10": interleaved(4096 + 4096), "layer.2": interleaved(4096)},
        {"layer.10": interleaved(4096 + 2048, 2048), "layer.2": interleaved(4096)},
    ],
)
def test_other_neighbours_are_regions_of_their_own(caches: dict[str, Shaped]) -> None:
    assert [region.name for region in geometry_of(connector_config(), CACHE, caches).regions] == [
        "layer.2",
        "layer.10",
    ]


def test_groups_that_share_memory_are_a_region_each() -> None:
    groups = (
        KVCacheGroup(("layer.0", "layer.2")),
        KVCacheGroup(("layer.1", "layer.3"), sliding_window=8),
    )
    caches = {f"layer.{index}": interleaved(4096 + index // 2 * 2048) for index in range(4)}
    regions = geometry_of(connector_config(), replace(CACHE, groups=groups), caches).regions
    assert [(r.group, r.address, r.layer_names) for r in regions] == [
        (0, 4096, ("layer.0", "layer.2")),
        (1, 4096, ("layer.1", "layer.3")),
    ]


def test_an_engine_that_may_show_others_a_block_loaded_in_part_says_so() -> None:
    windows = replace(CACHE, groups=(KVCacheGroup(LAYERS, sliding_window=8),))
    caches = {"layer.2": Shaped(HND, device=FakeDevice())}
    needs = [
        geometry_of(connector_config(), cache, caches).needs_whole_blocks
        for cache in (CACHE, windows)
    ]
    assert needs == [False, True]
    assert not geometry_of(
        connector_config(), replace(windows, hides_partial_loads=True), caches
    ).needs_whole_blocks


@pytest.mark.parametrize(
    ("of_model", "ranks", "in_cache", "counted"),
    [(8, 2, 4, 8), (2, 4, 1, 2), (8, 1, 8, 8), (128, 2, 1, 1), (128, 1, 1, 1)],
)
def test_a_latent_cache_is_one_head_on_every_rank_however_many_the_model_has(
    of_model: int, ranks: int, in_cache: int, counted: int
) -> None:
    config = connector_config()
    config = replace(
        config,
        model=replace(config.model, total_kv_heads=of_model),
        parallel=ParallelConfig(ranks, 0),
    )
    cache = KVCacheConfig(8, 16, (KVCacheGroup(LAYERS),), "HND", in_cache, 8, "float32")
    tensor = Shaped((8, in_cache, 16, 16), device=FakeDevice())
    assert geometry_of(config, cache, {"layer.2": tensor}).total_kv_heads == counted


def test_a_layer_of_no_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="belongs to no KV-cache group"):
        regions_of(Shaped((8, 2, 16, 16)), names=("layer.3",))
