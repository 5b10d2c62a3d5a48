"""Tests that read plans cover each needed byte exactly once and no other byte, for any difference
between the two engines.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.caches import Bytes, Cache, Form, Model, put_in_order, read

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.planning.axes import SMALL_SEGMENT_BYTES
from kvferry.protocol.planning.geometry import check_geometry
from kvferry.protocol.planning.heads import can_divide
from kvferry.protocol.planning.plan import BlockPermutation, plan_permutations, plan_read
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import KVLayout, MemoryKind

GROUPS = (("layer.0", "layer.2"), ("layer.1", "layer.3"))
HND, NHD = Form(layout=KVLayout.HND), Form(layout=KVLayout.NHD)


@st.composite
def forms(draw: st.DrawFn, heads: int) -> Form:
    block_size = draw(st.sampled_from([2, 4, 8]), "block size")
    return Form(
        tp_size=draw(
            st.sampled_from([size for size in (1, 2, 3, 4, 6) if can_divide(heads, size)])
        ),
        block_size=block_size,
        layout=draw(st.sampled_from(list(KVLayout))),
        parts=draw(st.sampled_from([parts for parts in (1, 2, 4) if parts < block_size])),
        has_shared_blocks=draw(st.booleans()),
        num_blocks=48 // block_size,
        gap=draw(st.sampled_from([0, 8])),
        memory=draw(st.sampled_from(list(MemoryKind))),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_needed_byte_is_covered_once_and_lands_in_its_place_and_no_other_is_written(
    data: st.DataObject,
) -> None:
    heads = data.draw(st.sampled_from([1, 2, 3, 4]), "heads")
    model = Model(
        heads, GROUPS, data.draw(st.sampled_from([4, SMALL_SEGMENT_BYTES // 2]), "item bytes")
    )
    at_p, at_d = data.draw(forms(heads), "P"), data.draw(forms(heads), "D")
    num_tokens = data.draw(st.integers(1, 24), "tokens on P")
    end = data.draw(st.integers(1, num_tokens), "loaded up to")
    first = (
        data.draw(st.integers(0, (end - 1) // at_d.block_size), "blocks D has") * at_d.block_size
    )
    needed = [0, data.draw(st.integers(0, end - 1), "window begins")]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    content = {
        layer: rng.integers(1, 256, (heads, num_tokens, model.item_bytes), dtype=np.uint8)
        for group in GROUPS
        for layer in group
    }
    theirs = [
        tables(rng, at_p, num_tokens, 0, taken=0),
        tables(rng, at_p, num_tokens, needed[1], taken=1),
    ]
    ours = [tables(rng, at_d, end, 0, taken=0), tables(rng, at_d, end, needed[1], taken=1)]
    producer = [Cache(model, at_p, rank) for rank in range(at_p.tp_size)]
    for cache in producer:
        for group, layers in enumerate(GROUPS):
            for layer in layers:
                cache.fill(layer, theirs[group], content[layer])
    for rank in range(at_d.tp_size):
        consumer = Cache(model, at_d, rank)
        for other in producer:
            check_geometry("p", consumer.geometry, other.geometry)
        counts = read(consumer, producer, ours, theirs, range(first, end), needed)
        check(consumer, producer[0], counts, content, ours, theirs, range(first, end), needed)


def tables(
    rng: np.random.Generator, form: Form, num_tokens: int, seen_from: int, taken: int
) -> list[int]:
    """Return a block table with holes for the blocks that end before `seen_from`. The tables of
    different groups use different halves of the blocks.
    """
    half = form.num_blocks // 2
    blocks = (rng.permutation(half) + taken * half)[: -(-num_tokens // form.block_size)].tolist()
    return [
        NO_BLOCK if (index + 1) * form.block_size <= seen_from else block
        for index, block in enumerate(blocks)
    ]


def check(
    consumer: Cache,
    producer: Cache,
    counts: list[Bytes],
    content: dict[str, Bytes],
    ours: list[list[int]],
    theirs: list[list[int]],
    tokens: range,
    needed: list[int],
) -> None:
    size = min(consumer.form.block_size, producer.form.block_size)
    heads, item = consumer.geometry.num_kv_heads, consumer.model.item_bytes
    for group, layers in enumerate(GROUPS):
        is_moved = moved_tokens(
            consumer.form, producer.form, ours[group], theirs[group], tokens, needed[group], size
        )
        for layer in layers:
            got = consumer.tokens(layer, ours[group])
            for position in range(got.shape[1]):
                is_known = is_moved[position] and position < content[layer].shape[1]
                wanted = content[layer][consumer.geometry.heads, position] if is_known else 0
                assert (got[:, position] == wanted).all(), (layer, position)
            assert all(
                is_moved[position]
                for position in range(max(tokens.start, needed[group]), tokens.stop)
            )
        written = sum(
            int(count.sum())
            for region, count in zip(consumer.geometry.regions, counts, strict=True)
            if region.group == group
        )
        assert written == sum(is_moved) * len(layers) * heads * item
    for region, count in zip(consumer.geometry.regions, counts, strict=True):
        assert count.max() <= 1
        assert not count[:, region.block_bytes :].any()
        assert not np.delete(
            count, [block for block in ours[region.group] if block != NO_BLOCK], axis=0
        ).any()


def moved_tokens(
    at_d: Form,
    at_p: Form,
    ours: list[int],
    theirs: list[int],
    tokens: range,
    needed: int,
    size: int,
) -> list[bool]:
    """Return for each position whether a plan must move it, directly from the definition. Positions
    from the first missing token to the end of the last token's segment of `size` tokens are moved
    if neither side has a hole there.
    """
    last = -(-tokens.stop // size) * size
    return [
        tokens.start <= position < last
        and ours[position // at_d.block_size] != NO_BLOCK
        and theirs[min(position // at_p.block_size, len(theirs) - 1)] != NO_BLOCK
        for position in range(len(ours) * at_d.block_size)
    ]


def test_nothing_missing_is_nothing_to_move() -> None:
    cache = Cache(Model(), Form(), 0).geometry
    assert plan_read(cache, cache, [[1]], [[2]], range(4, 4)) == []
    assert plan_permutations(cache, [Cache(Model(), NHD, 0).geometry], [[1]], range(4, 4)) == []


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
def test_block_lists_are_checked_before_any_address_is_computed(
    ours: list[list[int]], theirs: list[list[int]]
) -> None:
    cache = Cache(Model(), Form(), 0).geometry
    with pytest.raises(RemoteProtocolError):
        plan_read(cache, cache, ours, theirs, range(0, 8))


def segments(
    local: Form,
    remote: Form,
    model: Model = Model(),  # noqa: B008  frozen
) -> list[tuple[int, list[int], list[int]]]:
    """Return segment size, local and remote offsets of a two-block plan, per local region."""
    ours, theirs = Cache(model, local, 0), Cache(model, remote, 0)
    plan = plan_read(ours.geometry, theirs.geometry, [[0, 5]], [[3, 1, 4, 2]], range(8))
    return [(p.segment_bytes, p.local_offsets.tolist(), p.remote_offsets.tolist()) for p in plan]


def test_equal_sides_move_whole_blocks() -> None:
    assert segments(NHD, NHD) == [(32, [0, 160], [96, 32])] * 2


def test_layers_that_move_the_same_runs_share_their_offsets_and_no_others_do() -> None:
    model = Model(layers=GROUPS)
    ours, theirs = Cache(model, NHD, 0), Cache(model, replace(NHD, tp_size=2), 0)
    plan = plan_read(ours.geometry, theirs.geometry, [[0, 5], [1, 2]], [[3, 1], [3, 1]], range(8))
    assert len(plan) == 4
    for part in plan:
        group = ours.geometry.regions[part.local_region].group
        for other in plan:
            is_alike = ours.geometry.regions[other.local_region].group == group
            assert (part.local_offsets is other.local_offsets) is is_alike
            assert (part.remote_offsets is other.remote_offsets) is is_alike


def test_layers_that_share_blocks_on_both_sides_move_as_one_segment_per_block() -> None:
    shared = replace(HND, has_shared_blocks=True)
    assert segments(shared, shared) == [(64, [0, 320], [192, 64])]
    assert segments(shared, HND) == [(32, [0, 320], [96, 32]), (32, [32, 352], [96, 32])]


def test_with_the_heads_outside_a_range_of_them_is_one_segment_per_block() -> None:
    assert segments(replace(HND, tp_size=2), HND) == [(16, [0, 80], [96, 32])] * 2


def test_with_the_tokens_outside_blocks_of_unequal_size_move_as_whole_smaller_ones() -> None:
    assert [size for size, *_ in segments(NHD, replace(NHD, block_size=2))] == [16, 16] * 2


@pytest.mark.parametrize("form", [HND, NHD, replace(HND, parts=2)])
def test_regions_of_which_one_is_not_understood_move_whole_blocks_of_both(form: Form) -> None:
    ours, theirs = (Cache(Model(), form, 0).geometry for _ in range(2))
    ours, theirs = (
        replace(side, regions=(side.regions[0], replace(side.regions[1], axes=None)))
        for side in (ours, theirs)
    )
    check_geometry("p", ours, theirs)
    plan = plan_read(ours, theirs, [[0, 5]], [[3, 1]], range(8))
    assert [(p.local_region, p.total_bytes) for p in plan] == [(0, 64), (1, 64)]


def test_small_runs_are_read_in_the_producers_order_and_put_into_ours_afterwards() -> None:
    assert segments(HND, NHD) == segments(HND, HND)
    ours, theirs = Cache(Model(), HND, 0), Cache(Model(), NHD, 0)
    [first, second] = plan_permutations(
        ours.geometry, [theirs.geometry], [[0, NO_BLOCK, 5]], range(12)
    )
    assert (first.region, second.region, first.offsets.tolist()) == (0, 1, [0, 160])
    assert sorted(zip(first.shape, first.arrived, first.wanted, strict=True)) == [
        (2, 4, 16),
        (4, 8, 4),
    ]


def test_long_runs_are_read_straight_into_their_place() -> None:
    model = Model(item_bytes=SMALL_SEGMENT_BYTES)
    ours, theirs = Cache(model, HND, 0), Cache(model, NHD, 0)
    assert plan_permutations(ours.geometry, [theirs.geometry], [[0]], range(4)) == []
    assert {size for size, *_ in segments(HND, NHD, model)} == {SMALL_SEGMENT_BYTES}


def test_memory_that_cannot_be_rearranged_here_is_filled_in_its_own_order() -> None:
    far = replace(HND, memory=MemoryKind.VRAM)
    assert (
        plan_permutations(
            Cache(Model(), far, 0).geometry, [Cache(Model(), NHD, 0).geometry], [[0]], range(4)
        )
        == []
    )
    assert {size for size, *_ in segments(far, NHD)} == {4}


def test_ranks_that_arrange_their_blocks_differently_are_not_placed() -> None:
    ours = Cache(Model(heads=4), replace(HND, tp_size=1), 0).geometry
    theirs = [
        Cache(Model(heads=4), replace(form, tp_size=2), rank).geometry
        for rank, form in enumerate((HND, NHD))
    ]
    with pytest.raises(RemoteProtocolError, match="different orders"):
        plan_permutations(ours, theirs, [[0]], range(4))


def test_the_check_of_placement_would_see_a_wrong_order() -> None:
    memory: Bytes = np.arange(8, dtype=np.uint8).reshape(1, 8)
    put_in_order(memory, BlockPermutation(0, 8, np.zeros(1, np.int64), 1, (2, 4), (1, 2), (4, 1)))
    assert memory.tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]]
