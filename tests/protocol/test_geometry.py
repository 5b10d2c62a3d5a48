"""Tests that a peer's description of its cache is validated, and that a refusal names the field
that prevents a transfer plan.
"""

from dataclasses import replace
from typing import Any

import pytest
from tests.protocol.caches import Cache, Form, Model

from kvferry.errors import IncompatiblePeer, RemoteProtocolError
from kvferry.protocol.messages import RankLayout, decode_layout, encode_layout
from kvferry.protocol.planning.geometry import (
    Geometry,
    check_geometry,
    geometry_from_layout,
)
from kvferry.types import AxisKind, KVLayout, MemoryKind, Region


# `Form` and `Model` are frozen, so they are safe as default arguments.
def make(form: Form = Form(), model: Model = Model(), rank: int = 0) -> Geometry:  # noqa: B008
    return Cache(model, form, rank).geometry


def opaque(geometry: Geometry) -> Geometry:
    """Return the same geometry without axes: the arrangement inside a block is unknown."""
    return replace(
        geometry, regions=tuple(replace(region, axes=None) for region in geometry.regions)
    )


def packed(form: Form) -> Geometry:
    """Return the geometry of a kernel that packs the tokens of each head in its own way."""
    made = make(form)
    regions = tuple(
        replace(r, axes=tuple(axis for axis in r.axes or () if axis.kind is AxisKind.HEAD))
        for r in made.regions
    )
    return replace(made, regions=regions)


def make_layout(**changes: object) -> RankLayout:
    fields = {
        "tp_rank": 0,
        "tp_size": 1,
        "block_size": 4,
        "num_blocks": 12,
        "layout": KVLayout.HND,
        "num_kv_heads": 2,
        "head_dim": 8,
        "control_address": "tcp://h:1",
        "regions": list(make().regions),
        "offers": [],
        "total_kv_heads": 2,
    }
    return RankLayout(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("block_size", [1, 2, 8, 64])
@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("has_shared_blocks", [False, True])
def test_block_size_layout_and_shared_blocks_may_differ(
    block_size: int, layout: KVLayout, has_shared_blocks: bool
) -> None:
    other = Form(
        block_size=block_size,
        layout=layout,
        has_shared_blocks=has_shared_blocks,
        num_blocks=99,
        gap=8,
    )
    check_geometry("p", make(), make(other))
    check_geometry("p", make(other), make())


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (make(Form(block_size=6)), "block_size"),
        (make(model=Model(layers=(("layer.0",),))), "layers"),
        (make(model=Model(layers=(("layer.0",), ("layer.1",)))), "groups"),
        (make(model=Model(item_bytes=8)), "token_bytes"),
        (replace(make(), head_dim=16), "head_dim"),
        (replace(make(), total_kv_heads=4), "total_kv_heads"),
        (replace(make(), tp_size=2), "num_kv_heads"),
        (replace(make(), tp_size=3), "tp_size"),
    ],
)
def test_a_difference_is_refused_by_name_with_both_values(other: Geometry, field: str) -> None:
    with pytest.raises(IncompatiblePeer, match=f"{field}: ours .*, theirs .*") as caught:
        check_geometry("p", make(), other)
    assert field in caught.value.differences


@pytest.mark.parametrize(
    ("form", "field"),
    [
        (Form(block_size=8), "block_size"),
        (Form(layout=KVLayout.NHD), "kv_cache_layout"),
        (Form(tp_size=2), "tp_size"),
        (Form(has_shared_blocks=True), "regions"),
    ],
)
def test_blocks_that_cannot_be_cut_must_be_alike(form: Form, field: str) -> None:
    check_geometry("p", opaque(make()), opaque(make(Form(num_blocks=5, gap=16))))
    with pytest.raises(IncompatiblePeer, match=f"{field}: ours .*, theirs .*"):
        check_geometry("p", opaque(make()), opaque(make(form)))
    with pytest.raises(IncompatiblePeer, match=f"{field}: ours .*, theirs .*"):
        check_geometry("p", make(), opaque(make(form)))


def test_blocks_whose_tokens_are_packed_can_be_cut_by_heads_but_not_by_tokens() -> None:
    check_geometry("p", packed(Form()), packed(Form(tp_size=2)))
    for form in (Form(block_size=8), Form(block_size=2)):
        with pytest.raises(IncompatiblePeer, match="block_size: ours 4, theirs"):
            check_geometry("p", packed(Form()), packed(form))
    with pytest.raises(IncompatiblePeer, match=r"order within a block: ours .*4 tokens.*, theirs"):
        check_geometry("p", packed(Form()), make())


def test_an_engine_that_would_show_others_a_block_loaded_in_part_takes_only_blocks_that_fill_its_own() -> (  # noqa: E501
    None
):
    ours = replace(make(), needs_whole_blocks=True)
    check_geometry("p", ours, make(Form(block_size=8)))
    check_geometry("p", make(), make(Form(block_size=2)))
    with pytest.raises(IncompatiblePeer, match="block_size: ours 4, theirs 2"):
        check_geometry("p", ours, make(Form(block_size=2)))


def test_device_memory_meets_every_layout_and_block_size_too() -> None:
    far = make(Form(memory=MemoryKind.VRAM))
    for form in (
        Form(),
        Form(layout=KVLayout.NHD),
        Form(block_size=2),
        Form(block_size=8, layout=KVLayout.NHD),
    ):
        check_geometry("p", far, make(form))
        check_geometry("p", make(form), far)


def test_engines_that_do_not_understand_different_layers_do_not_meet() -> None:
    made = make()
    first, second = made.regions
    ours = replace(made, regions=(first, replace(second, axes=None)))
    theirs = replace(made, regions=(replace(first, axes=None), second))
    check_geometry("p", ours, ours)
    with pytest.raises(IncompatiblePeer, match="order within a block"):
        check_geometry("p", ours, theirs)


@pytest.mark.parametrize(
    "form", [Form(), Form(layout=KVLayout.NHD, has_shared_blocks=True, gap=4), Form(parts=2)]
)
def test_a_layout_from_the_wire_becomes_the_geometry_it_was_made_from(form: Form) -> None:
    ours = make(form)
    layout = make_layout(layout=form.layout, regions=list(ours.regions))
    assert received(layout) == ours


def received(layout: RankLayout) -> Geometry:
    return geometry_from_layout(decode_layout(encode_layout(layout)))


def info(**changes: Any) -> Region:
    return replace(Region("l", 0, 64, 64, 12), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "XYZ"},
        {"tp_rank": 1},
        {"tp_rank": -1},
        {"tp_size": 0},
        {"block_size": 0},
        {"block_size": 2**17, "regions": [info()]},
        {"num_blocks": -1},
        {"regions": []},
        {"regions": [info(), info()]},
        {"regions": [info(stride_bytes=32)]},
        {"regions": [info(block_bytes=0)]},
        {"regions": [info(address=-1)]},
        {"regions": [info(address=2**64 - 1)]},
        {"regions": [info(num_blocks=13)]},
        {"regions": [info(device=-1)]},
        {"regions": [info(memory="VRAM", device=2**40)]},
        {"regions": [info(memory="TAPE")]},
        {"regions": [info(group=-1)]},
        {"regions": [info(axes=[("head", 2, 32), ("planet", 4, 8)])]},
        {"regions": [info(axes=[("head", 4, 16), ("token", 4, 4)])]},
        {"regions": [info(axes=[("head", 2, 32), ("token", 3, 8)])]},
        {"regions": [info(axes=[("head", 2, 64), ("token", 4, 8)])]},
        {"regions": [info(axes=[("head", 2, 32), ("token", 4, -8)])]},
        {"regions": [info(axes=[("head", 2, 32), ("token", 0, 8)])]},
        {"regions": [info(axes=[("head", 2, 32), ("token", 4, 4)])]},
        {"regions": [info(axes=[("layer", 2, 32), ("head", 2, 16), ("token", 4, 4)])]},
        {"regions": [info(layers=["a", "b"], axes=[("head", 2, 32), ("token", 4, 8)])]},
    ],
)
def test_a_senseless_layout_is_refused(changes: dict[str, object]) -> None:
    received(make_layout(regions=[info()]))
    with pytest.raises(RemoteProtocolError):
        received(make_layout(**changes))
