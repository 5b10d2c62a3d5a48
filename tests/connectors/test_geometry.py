"""Cache tensors become regions; what does not lie in whole blocks is refused at the start."""

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
    """A tensor's outside: shape and strides in elements, float32."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    device: FakeDevice | None = None

    def data_ptr(self) -> int:
        return 4096

    def element_size(self) -> int:
        return 4

    def stride(self, dim: int) -> int:
        return self.strides[dim] if self.strides else prod(self.shape[dim + 1 :])


def regions_of(tensor: Shaped, num_blocks: int = 8, names: tuple[str, ...] = LAYERS) -> list[tuple[str, int, int, int]]:
    tensor.device = FakeDevice()
    cache = KVCacheConfig(num_blocks, 16, (KVCacheGroup(LAYERS),), "HND", 2, 8, "float32")
    regions = geometry_of(connector_config(), cache, {name: tensor for name in names}).regions
    return [(r.name, r.block_bytes, r.stride_bytes, r.num_blocks) for r in regions]


def test_layers_come_in_their_natural_order() -> None:
    assert regions_of(Shaped((8, 2, 16, 16))) == [("layer.2", 2048, 2048, 8), ("layer.10", 2048, 2048, 8)]


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


@pytest.mark.parametrize(
    ("tensor", "layout", "runs"),
    [
        (Shaped(HND), "HND", 1),
        (Shaped(NHD), "NHD", 16),
        (Shaped(HND, (512, 16, 32, 1)), "NHD", 16),
        (Shaped((16, 2, 8, 16)), "HND", 2),
        (Shaped((16, 8, 2, 16)), "NHD", 16),
        (Shaped(HND), "NHD", 0),
        (Shaped(NHD), "HND", 0),
        (Shaped((8, 2, 2, 16, 8)), "HND", 0),
        (Shaped((8, 16, 32)), "HND", 0),
        (Shaped((24, 2, 16, 16)), "HND", 0),
    ],
)
def test_where_a_head_lies_in_a_block_is_known_only_if_the_tensor_lies_as_its_layout_says(tensor: Shaped, layout: str, runs: int) -> None:
    tensor.device = FakeDevice()
    cache = KVCacheConfig(8, 16, (KVCacheGroup(LAYERS),), layout, 2, 8, "float32")
    assert [region.head_runs for region in geometry_of(connector_config(), cache, {"layer.2": tensor}).regions] == [runs]


@pytest.mark.parametrize(
    ("of_model", "ranks", "in_cache", "counted"), [(8, 2, 4, 8), (2, 4, 1, 2), (8, 1, 8, 8), (128, 2, 1, 1), (128, 1, 1, 1)]
)
def test_a_latent_cache_is_one_head_on_every_rank_however_many_the_model_has(
    of_model: int, ranks: int, in_cache: int, counted: int
) -> None:
    config = connector_config()
    config = replace(config, model=replace(config.model, total_kv_heads=of_model), parallel=ParallelConfig(ranks, 0))
    cache = KVCacheConfig(8, 16, (KVCacheGroup(LAYERS),), "HND", in_cache, 8, "float32")
    tensor = Shaped((8, in_cache, 16, 16), device=FakeDevice())
    assert geometry_of(config, cache, {"layer.2": tensor}).total_kv_heads == counted


def test_a_layer_of_no_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="belongs to no KV-cache group"):
        regions_of(Shaped((8, 2, 16, 16)), names=("layer.3",))
