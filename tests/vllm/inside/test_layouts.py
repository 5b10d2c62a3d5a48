"""Tests caches as vLLM allocates them: the geometry that we derive from them, and the transfer of
their blocks.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm.inside.conftest import StartEngine
from tests.vllm.inside.engines import BLOCK, Engine, cache_config, run_until, vllm_config
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.connectors.geometry import geometry_of
from kvferry.errors import ConfigError, IncompatiblePeer
from kvferry.protocol.planning.geometry import Geometry, check_geometry
from kvferry.protocol.planning.plan import plan_read
from kvferry.vllm import translate

FLOAT = 4
KINDS = ["full attention", "MLA", "a window kept whole", "layers of two sizes", "padded pages"]
SERVED = [*((kind, "LBHNC") for kind in KINDS), ("full attention", "LBNHC"), ("MLA", "LBNHC")]


def measured(
    model: Path, kind: str, layout: str, **settings: Any
) -> tuple[Geometry, dict[str, torch.Tensor]]:
    config = vllm_config(str(model), "p", json.dumps(settings | {"layout": layout}, sort_keys=True))
    with set_current_vllm_config(config):
        cache = cache_config(config, kind)
        tensors = allocate_kv_cache(cache, torch.device("cpu"), KVCacheLayout[layout])
        geometry = geometry_of(our_config(config), translate.cache_config(config, cache), tensors)
    return geometry, {region.name: tensors[region.name] for region in geometry.regions}


def our_config(config: VllmConfig) -> Any:
    from tests.connectors.pair import MemoryKit

    from kvferry.config import KVTransferConfig, SideChannelConfig
    from kvferry.connectors.contract import ConnectorConfig, ModelIdentity, ParallelConfig
    from kvferry.transports.memory import MemoryNetwork

    transfer = KVTransferConfig.from_mapping(
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    )
    identity = ModelIdentity("Tiny", "abc", 4, 2, 64, "float32")
    return ConnectorConfig(
        transfer,
        identity,
        ParallelConfig(),
        SideChannelConfig(port=0),
        b"secret",
        "epoch",
        MemoryKit(MemoryNetwork()),
    )


@pytest.mark.parametrize(
    ("kind", "layout", "block_bytes", "stride_bytes"),
    [
        ("full attention", "LBHNC", [2 * BLOCK * 128 * FLOAT] * 4, [2 * BLOCK * 128 * FLOAT] * 4),
        ("full attention", "LBNHC", [2 * BLOCK * 128 * FLOAT] * 4, [2 * BLOCK * 128 * FLOAT] * 4),
        (
            "a window kept whole",
            "LBHNC",
            [2 * BLOCK * 128 * FLOAT] * 4,
            [2 * BLOCK * 128 * FLOAT] * 4,
        ),
        ("MLA", "LBHNC", [BLOCK * 576 * FLOAT] * 4, [BLOCK * 576 * FLOAT] * 4),
        (
            "layers of two sizes",
            "LBHNC",
            [2 * BLOCK * size * FLOAT for size in (64, 128, 64, 128)],
            None,
        ),
        (
            "padded pages",
            "LBHNC",
            [2 * BLOCK * 128 * FLOAT] * 4,
            [2 * BLOCK * 128 * FLOAT + 4096] * 4,
        ),
    ],
)
def test_one_region_per_layer(
    model: Path, kind: str, layout: str, block_bytes: list[int], stride_bytes: list[int] | None
) -> None:
    geometry, tensors = measured(model, kind, layout)
    assert [region.name for region in geometry.regions] == [
        f"model.layers.{index}.self_attn.attn" for index in range(4)
    ]
    assert [region.address for region in geometry.regions] == [
        tensor.data_ptr() for tensor in tensors.values()
    ]
    assert [region.block_bytes for region in geometry.regions] == block_bytes
    assert [region.stride_bytes for region in geometry.regions] == (stride_bytes or block_bytes)
    assert {region.group for region in geometry.regions} == {0}
    assert geometry.block_size == BLOCK
    ends = sorted(
        (region.address, region.address + region.size_bytes) for region in geometry.regions
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(ends)), "regions overlap"


@pytest.mark.parametrize(("kind", "layout"), SERVED)
def test_a_plan_covers_exactly_the_blocks_of_the_tokens(
    model: Path, kind: str, layout: str
) -> None:
    geometry, tensors = measured(model, kind, layout)
    for segments, tensor in zip(
        plan_read(
            geometry,
            geometry,
            [[5, 9, 2]],
            [[1, 7, 3]],
            range(BLOCK, 2 * BLOCK + 1),
        ),
        tensors.values(),
        strict=True,
    ):
        here = [tensor.data_ptr() + int(offset) for offset in segments.local_offsets]
        there = [tensor.data_ptr() + int(offset) for offset in segments.remote_offsets]
        assert here == [tensor[block].data_ptr() for block in (9, 2)]
        assert there == [tensor[block].data_ptr() for block in (7, 3)]
        assert segments.segment_bytes == tensor[0].numel() * FLOAT


def test_layouts_of_a_kernel_that_packs_tokens_are_not_mixed(model: Path) -> None:
    heads_first, _ = measured(model, "full attention", "LBHNC")
    tokens_first, _ = measured(model, "full attention", "LBNHC")
    check_geometry("p", heads_first, heads_first)
    with pytest.raises(IncompatiblePeer, match="kv_cache_layout"):
        check_geometry("p", heads_first, tokens_first)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_other_layouts_are_refused_by_name(model: Path, layout: str) -> None:
    with pytest.raises(ConfigError, match=f"in the layout {layout} yet"):
        measured(model, "full attention", layout)


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_blocks_whose_bytes_are_not_adjacent_are_never_taken_for_such(
    model: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the layout's name were not refused, the tensor's strides still would be."""
    monkeypatch.setitem(translate.LAYOUTS, layout, "HND")
    with pytest.raises(ConfigError, match="cannot be cut into 64 blocks of adjacent bytes"):
        measured(model, "full attention", layout)


@pytest.mark.parametrize(("kind", "layout"), SERVED)
def test_such_a_cache_is_handed_over(start_engine: StartEngine, kind: str, layout: str) -> None:
    p, d = start_engine("p", kind=kind, layout=layout), start_engine("d", kind=kind, layout=layout)
    tokens = [10 + (index * 7) % 300 for index in range(100)]
    d.add("b", tokens, p.prefill("a", tokens))
    run_until(lambda: d.answers["b"].finish is not None, p, d)
    assert (d.answers["b"].finish, d.loaded_tokens, d.wrong_slots) == ("length", 100, [])
    run_until(lambda: not p.remains() and not d.remains(), p, d)


@pytest.mark.parametrize("length", [20, 47, 48, 49, 64, 65, 79, 96, 100, 127, 128, 129, 200])
@pytest.mark.parametrize("kind", ["windows beside full attention", "chunks beside full attention"])
def test_where_attention_forgets_what_is_seen_is_handed_over(
    start_engine: StartEngine, kind: str, length: int
) -> None:
    p, d = start_engine("p", kind=kind), start_engine("d", kind=kind)
    tokens = [10 + (index * 7) % 300 for index in range(length)]
    d.add("b", tokens, p.prefill("a", tokens))
    run_until(lambda: d.answers["b"].finish is not None, p, d)
    # P has freed the first block that the prompt's last token attends to if the token after it
    # would no longer attend to that block.
    last, following = (
        (length - 48, length - 47)
        if "windows" in kind
        else ((length - 1) // 64 * 64, length // 64 * 64)
    )
    is_gone = max(0, last) // BLOCK < max(0, following) // BLOCK
    assert (d.answers["b"].finish, d.loaded_tokens, d.wrong_slots) == (
        "length",
        0 if is_gone else length - 1,
        [],
    )
    run_until(lambda: not p.remains() and not d.remains(), p, d)


BRIDGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"layout": "LBNHC"}, {"layout": "LBHNC"}),
    ({"layout": "LBHNC"}, {"layout": "LBNHC"}),
    ({"block_size": 64}, {"block_size": 32}),
    ({"block_size": 32}, {"block_size": 64, "layout": "LBNHC"}),
    ({"block_size": 32, "kind": "MLA"}, {"block_size": 64, "kind": "MLA"}),
    ({"layout": "BLHNC"}, {"layout": "LBHNC"}),
    ({"layout": "BLNHC"}, {"layout": "BLHNC", "block_size": 64}),
    (
        {"block_size": 64, "kind": "windows beside full attention"},
        {"block_size": 32, "kind": "windows beside full attention"},
    ),
]


@pytest.mark.parametrize(("at_p", "at_d"), BRIDGED)
def test_where_kernels_keep_tokens_apart_caches_of_unequal_form_are_handed_over(
    start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
    at_p: dict[str, Any],
    at_d: dict[str, Any],
) -> None:
    """GPU attention backends store tokens this way, but none of them runs here; the made-up forward
    stores them this way too.
    """
    monkeypatch.setattr(translate, "has_token_rows", lambda backends: True)
    p, d = start_engine("p", **at_p), start_engine("d", **at_d)
    tokens = [10 + (index * 7) % 300 for index in range(100)]
    d.add("b", tokens, p.prefill("a", tokens))
    run_until(lambda: d.answers["b"].finish is not None, p, d)
    assert (d.answers["b"].finish, d.wrong_slots) == ("length", [])
    assert d.loaded_tokens >= 99
    run_until(lambda: not p.remains() and not d.remains(), p, d)


def test_a_consumer_with_windows_refuses_blocks_that_would_fill_its_own_in_part(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would offer such a partly filled block to other requests as a full one."""
    monkeypatch.setattr(translate, "has_token_rows", lambda backends: True)
    lease = {"kv_connector_extra_config": {"kv_lease_duration": 1.0}}
    p = start_engine("p", kind="windows beside full attention", block_size=32, kv=lease)
    d = start_engine("d", kind="windows beside full attention", block_size=64)
    tokens = [10 + (index * 7) % 300 for index in range(100)]
    d.add("b", tokens, p.prefill("a", tokens))
    run_until(lambda: d.answers["b"].finish is not None, p, d)
    assert (d.answers["b"].finish, d.answers["b"].tokens) == ("error", [])
    run_until(lambda: not p.remains() and not d.remains(), p, d)


def test_layers_that_share_blocks_are_one_region(model: Path) -> None:
    geometry, _ = measured(model, "full attention", "BLHNC")
    [region] = geometry.regions
    assert region.layer_names == tuple(f"model.layers.{index}.self_attn.attn" for index in range(4))
    assert (region.block_bytes, region.stride_bytes) == (4 * 2 * BLOCK * 128 * FLOAT,) * 2
    [(size, here)] = [
        (segments.segment_bytes, segments.local_offsets.tolist())
        for segments in plan_read(geometry, geometry, [[5, 9]], [[1, 7]], range(2 * BLOCK))
    ]
    assert (size, here) == (region.block_bytes, [5 * region.block_bytes, 9 * region.block_bytes])


@pytest.mark.parametrize(
    ("at_p", "at_d"),
    [
        ({"layout": "LBNHC"}, {"layout": "LBHNC"}),
        ({"kind": "MLA"}, {"kind": "full attention"}),
        ({"kind": "padded pages"}, {"kind": "layers of two sizes"}),
        ({"block_size": 64}, {"block_size": 32}),
    ],
)
def test_engines_whose_caches_differ_fail_the_request_and_leave_nothing(
    start_engine: StartEngine, at_p: dict[str, Any], at_d: dict[str, Any]
) -> None:
    lease = {"kv_connector_extra_config": {"kv_lease_duration": 1.0}}
    p, d = start_engine("p", kv=lease, **at_p), start_engine("d", **at_d)
    tokens = [10 + (index * 7) % 300 for index in range(60)]
    d.add("b", tokens, p.prefill("a", tokens))
    run_until(lambda: d.answers["b"].finish is not None, p, d)
    assert (d.answers["b"].finish, d.answers["b"].tokens) == ("error", [])
    run_until(lambda: not p.remains() and not d.remains(), p, d)


def test_layers_that_share_anothers_cache(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3n: vLLM also passes such a layer's tensor to the connector, which does not know that
    layer.
    """
    import tests.vllm.inside.engines as engines

    def with_alias(*arguments: Any) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = allocate_kv_cache(*arguments)
        return tensors | {"model.layers.4.self_attn.attn": tensors["model.layers.3.self_attn.attn"]}

    monkeypatch.setattr(engines, "allocate_kv_cache", with_alias)
    Engine.close(start_engine("p"))
