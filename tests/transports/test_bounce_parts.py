"""Tests the pure parts of bounce buffers: slots never overlap, streams move exactly their bytes,
and forged messages are refused.
"""

import hashlib
import hmac
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalProtocolError, RemoteProtocolError
from kvferry.transports.base import Segments
from kvferry.transports.copy.gather import HostAddressCopier
from kvferry.transports.nixl.bounce.messages import (
    BOUNCE_VERSION,
    MAX_ENVELOPE_BYTES,
    MAX_METADATA_BYTES,
    PART_OFFSETS,
    BounceMessage,
    Envelope,
    InitiatorProgress,
    NotificationCodec,
    OffsetTable,
    SegmentGroup,
    SegmentPart,
    SlotRequest,
    TransferEnded,
    cut_into_parts,
)
from kvferry.transports.nixl.bounce.settings import BounceSettings, is_fragmented
from kvferry.transports.nixl.bounce.slots import (
    Direction,
    SegmentStream,
    Slot,
    SlotTable,
    chunk_end,
    common_granularity,
    fair_slot_bytes,
    round_to_granularity,
)
from kvferry.types import MemoryKind

SECRET = b"a secret of these tests"


# -- slots --


@given(
    st.integers(0, 3),
    st.integers(1, 64),
    st.lists(st.tuples(st.booleans(), st.integers(1, 40_000)), max_size=60),
)
def test_slots_never_overlap_and_all_is_free_at_the_end(
    first: int, pages: int, steps: Sequence[tuple[bool, int]]
) -> None:
    table = SlotTable(first * 4096, pages * 4096)
    taken: list[Slot] = []
    for takes, number in steps:
        if takes and (slot := table.take(number)) is not None:
            assert first * 4096 <= slot.first
            assert slot.end <= (first + pages) * 4096
            assert slot.size_bytes == number
            assert slot.first % 4096 == 0
            assert all(slot.end <= other.first or other.end <= slot.first for other in taken)
            taken.append(slot)
        elif not takes and taken:
            table.release(taken.pop(number % len(taken)))
    for slot in taken:
        table.release(slot)
    assert table.is_free
    assert table.take(pages * 4096) == Slot(first * 4096, pages * 4096)


@given(
    st.integers(8 * 4096, 400_000),
    st.sampled_from([1, 4096, 1000]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400_000)), max_size=60),
)
def test_two_who_share_a_bounce_buffer_never_overlap_and_neither_keeps_the_other_out(
    buffer_bytes: int, granularity: int, steps: Sequence[tuple[int, int]]
) -> None:
    tables, taken = SlotTable.shared_pair(buffer_bytes), (list[Slot](), list[Slot]())
    quarter = buffer_bytes // 4 // 4096 * 4096
    most, least = fair_slot_bytes(tables[0].size_bytes)
    for step, number in steps:
        who, takes = step % 2, step >= 2
        if not takes:
            if taken[who]:
                tables[who].release(taken[who].pop(number % len(taken[who])))
            continue
        slot = tables[who].take(min(number, most), least, granularity)
        # A side without any slot always gets one, no matter how many slots the other side holds.
        assert slot is not None or taken[who]
        if slot is not None:
            assert (
                round_to_granularity(min(number, least), granularity)
                <= slot.size_bytes
                <= min(number, most)
            )
            assert slot.first % 4096 == 0
            assert (0, quarter)[who] <= slot.first
            assert slot.end <= (buffer_bytes - quarter, buffer_bytes)[who]
            assert all(
                slot.end <= other.first or other.end <= slot.first
                for other in (*taken[0], *taken[1])
            )
            taken[who].append(slot)
    for who, table in enumerate(tables):
        for slot in taken[who]:
            table.release(slot)
        assert table.is_free
    for table in tables:  # alone, a side can take all but the other's quarter
        whole = table.take(buffer_bytes - quarter - 4096)
        assert whole is not None
        table.release(whole)


def test_whatever_the_other_has_two_transfers_of_a_side_find_room() -> None:
    buffer_bytes = 256 * 4096
    for mine, other in ((0, 1), (1, 0)):
        tables = SlotTable.shared_pair(buffer_bytes)
        most, least = fair_slot_bytes(tables[0].size_bytes)
        while tables[other].take(most, least) is not None:
            pass
        assert [tables[mine].take(most, least) is None for _ in range(2)] == [False, False]


def test_without_a_gap_that_is_large_enough_the_largest_is_taken_if_it_is_not_a_crumb() -> None:
    table = SlotTable(0, 10 * 4096)
    first, second = table.take(4 * 4096), table.take(3 * 4096)
    assert table.take(5 * 4096, 4 * 4096) is None
    assert table.take(5 * 4096, 2 * 4096, 1000) == Slot(7 * 4096, 9_000), (
        "three quarters of the gap: something is left for the next"
    )
    assert first is not None
    table.release(first)
    assert table.take(4096) == Slot(0, 4096)
    assert second == Slot(4 * 4096, 3 * 4096)


def test_a_slot_that_nobody_has_is_not_given_back() -> None:
    with pytest.raises(LocalProtocolError):
        SlotTable(0, 4096).release(Slot(0, 10))


@given(st.integers(1, 50), st.integers(0, 200), st.integers(0, 50))
def test_a_slot_holds_its_bytes_in_turn(size: int, start: int, length: int) -> None:
    places = [
        at + i for at, count in Slot(1000, size).places(start, start + length) for i in range(count)
    ]
    assert places == [1000 + byte % size for byte in range(start, start + length)]


def test_slots_hold_whole_segments_where_they_can() -> None:
    assert round_to_granularity(1000, 300) == 900
    assert round_to_granularity(200, 300) == 200
    assert common_granularity([300, 300], 1200) == 300
    assert common_granularity([300, 300], 1199) == 1
    assert common_granularity([300, 400], 10_000) == 1


@given(
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(1, 50),
    st.integers(1, 20),
    st.integers(1, 100),
)
def test_a_stretch_ends_between_two_grains_or_at_the_very_end(
    start: int, more: int, most: int, granularity: int, total: int
) -> None:
    start, limit = min(start, total), min(start + more, total)
    end = chunk_end(start, max(start, limit), most, granularity, total)
    assert start <= end <= max(start, limit)
    assert end - start <= most
    assert end in (start, total) or end % granularity == 0


# -- streams --


@st.composite
def segments(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Draw (segment size, positions of the segments) for each of several memories."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        slots = draw(st.lists(st.integers(0, 20), unique=True, min_size=0, max_size=12))
        made.append((draw(st.integers(1, 40)), slots))
    return made


@given(segments(), st.integers(1, 200), st.integers(1, 100), st.integers(0, 64))
def test_gathered_in_chunks_and_scattered_again_a_stream_is_what_it_was(
    plan: list[tuple[int, list[int]]], slot_bytes: int, chunk: int, first: int
) -> None:
    sources = [
        np.random.default_rng(number).integers(1, 256, 40 * 21, dtype=np.uint8)
        for number in range(len(plan))
    ]
    targets = [np.zeros_like(each) for each in sources]
    bounce_buffer = np.zeros(first + slot_bytes, np.uint8)
    slot, copier = Slot(first, slot_bytes), HostAddressCopier()
    streams = [_stream(plan, memories) for memories in (sources, targets)]
    at = 0
    while at < streams[0].total_bytes:
        end = min(streams[0].total_bytes, at + min(chunk, slot_bytes))
        for stream, direction in zip(streams, Direction, strict=True):
            copier.start(stream.copies(at, end, slot, bounce_buffer.ctypes.data, direction))
        at = end
    for (size, slots), source, target in zip(plan, sources, targets, strict=True):
        expected = np.zeros_like(source)
        for position in slots:
            expected[position * size : (position + 1) * size] = source[
                position * size : (position + 1) * size
            ]
        assert np.array_equal(target, expected)


def test_regions_that_share_their_offsets_share_a_list_of_copies() -> None:
    stream, shared = SegmentStream(), np.arange(8, dtype=np.int64)[::-1] * 64
    for region in range(5000):
        stream.append(1000 * region, 64, shared)
    total, slot = stream.total_bytes, Slot(0, stream.total_bytes)
    gathered = stream.copies(0, total, slot, 7, Direction.GATHER)
    assert [(part.size_bytes, part.num_places) for part in gathered] == [
        (64, count) for count in (2048, 2048, 904)
    ]
    assert all(part.sources is shared for part in gathered)
    assert gathered[0].target_bases[:2] == (7, 7 + 8 * 64)
    scattered = stream.copies(128, total, slot, 7, Direction.SCATTER)
    assert {part.size_bytes for part in scattered} == {64}


def test_more_than_a_slot_holds_is_not_cut() -> None:
    stream = SegmentStream()
    stream.append(0, 64, np.arange(8, dtype=np.int64))
    for start, end in ((0, 513), (-1, 5), (5, 4), (0, 101)):
        with pytest.raises(LocalProtocolError):
            stream.copies(start, end, Slot(0, 100), 0, Direction.GATHER)


def _stream(plan: list[tuple[int, list[int]]], memories: list[np.ndarray]) -> SegmentStream:
    stream = SegmentStream()
    for (size, slots), memory in zip(plan, memories, strict=True):
        stream.append(memory.ctypes.data, size, np.array(slots, np.int64) * size)
    return stream


# -- which transfers use bounce buffers --


def test_many_small_segments_are_fragmented_and_few_or_large_or_adjacent_ones_are_not() -> None:
    settings = BounceSettings(segment_bytes=65536).resolved(MemoryKind.DRAM)
    blocks = np.arange(1000, dtype=np.int64) * 16384
    shuffled = np.random.default_rng(1).permutation(blocks)

    def fragmented(local: np.ndarray, remote: np.ndarray, size: int = 16384) -> bool:
        return is_fragmented(
            [Segments(0, 0, size, local, remote), Segments(1, 1, size, local, remote)], settings
        )

    assert fragmented(shuffled, blocks)
    assert not fragmented(blocks, blocks)
    assert not fragmented(blocks[::-1], blocks[::-1])
    assert not fragmented(shuffled[:20], blocks[:20])
    assert not fragmented(shuffled * 4, blocks * 4, 65536)
    assert not is_fragmented([], settings)
    assert not is_fragmented([Segments(0, 0, 64, blocks[:0], blocks[:0])], settings)


def test_what_most_bytes_are_in_decides_whether_it_is_fragmented() -> None:
    settings = BounceSettings().resolved(MemoryKind.VRAM)
    near, far = (
        np.random.default_rng(seed).permutation(16384)[:4096].astype(np.int64) for seed in (1, 2)
    )
    row = np.arange(64, dtype=np.int64)
    # Every layer of the full-attention group is in scattered segments; the layers of the six groups
    # with windows are contiguous, and shorter.
    layers = [(near * 16384, far * 16384)] * 10 + [
        (group * 16384 + row * 16384,) * 2 for group in range(6) for _ in range(10)
    ]
    for order in (layers, layers[::-1]):
        assert is_fragmented(
            [Segments(n, n, 16384, *offsets) for n, offsets in enumerate(order)], settings
        )
    large = [
        Segments(n, n, 2 << 20, near[n : n + 64] * (2 << 20), far[n : n + 64] * (2 << 20))
        for n in range(60)
    ]
    small = [
        Segments(60 + n, 60 + n, 4096, near[n : n + 32] * 4096, far[n : n + 32] * 4096)
        for n in range(4)
    ]
    for plan in (large + small, small + large):
        assert not is_fragmented(plan, settings)


def test_by_default_device_memory_uses_bounce_buffers_and_host_memory_does_not() -> None:
    assert BounceSettings().resolved(MemoryKind.VRAM).is_on
    assert not BounceSettings().resolved(MemoryKind.DRAM).is_on
    assert not BounceSettings(segment_bytes=0).resolved(MemoryKind.VRAM).is_on
    assert BounceSettings(segment_bytes=4096).resolved(MemoryKind.DRAM).is_on


def test_a_bounce_buffer_that_nobody_has_set_takes_little_of_its_device() -> None:
    gib = 1 << 30
    assert BounceSettings().resolved(MemoryKind.VRAM, 140 * gib).buffer_bytes == gib
    assert BounceSettings().resolved(MemoryKind.VRAM, 16 * gib).buffer_bytes == 163 << 20
    assert (
        BounceSettings(buffer_bytes=2 * gib).resolved(MemoryKind.VRAM, 16 * gib).buffer_bytes
        == 2 * gib
    )


# -- messages --


@given(st.lists(st.integers(0, (1 << 62) - 1), max_size=50), st.integers(0, 40))
def test_offsets_come_out_as_they_went_in(numbers: list[int], shift: int) -> None:
    offsets = np.array(numbers, np.int64) >> shift << shift
    table = OffsetTable.of(offsets)
    assert len(table) == len(offsets)
    assert np.array_equal(table.offsets(), offsets)


def test_offsets_of_blocks_take_two_or_four_bytes_each() -> None:
    blocks = np.arange(70_000, dtype=np.int64) * (1 << 20)
    assert OffsetTable.of(blocks[:65_536]).width == 2
    assert OffsetTable.of(blocks).width == 4


@pytest.mark.parametrize(
    "table",
    [
        OffsetTable(5, 0, bytes(10)),
        OffsetTable(2, 0, bytes(3)),
        OffsetTable(4, 0, bytes(3)),
        OffsetTable(8, 3, bytes(8)),
    ],
)
def test_offsets_that_are_no_numbers_are_refused(table: OffsetTable) -> None:
    with pytest.raises(RemoteProtocolError):
        table.offsets()


def test_parts_name_every_segment_once_in_order_and_layers_share_their_offsets() -> None:
    random = np.random.default_rng(3)
    blocks = random.permutation(300).astype(np.int64) * 4096
    many = random.permutation(3 * PART_OFFSETS + 5).astype(np.int64)
    segments = [Segments(layer, layer + 1, 4096, blocks, blocks) for layer in range(40)] + [
        Segments(0, 99, 1, many, many)
    ]
    parts = list(cut_into_parts(7, segments))
    assert [part.number for part in parts] == list(range(len(parts)))
    assert [group.table for group in parts[0].groups] == [0] * 40 + [1]
    named = [
        (group.region, group.segment_bytes, offset)
        for part in parts
        for group in part.groups
        for offset in _offsets(part, group)
    ]
    assert named == [
        (part.remote_region, part.segment_bytes, offset)
        for part in segments
        for offset in part.remote_offsets.tolist()
    ]
    assert len(parts) == 4
    wide = list(cut_into_parts(7, [Segments(0, 99, 1, many, many + (1 << 40))]))
    assert all(
        len(note) <= MAX_ENVELOPE_BYTES
        for named in (parts, wide)
        for note in NotificationCodec(SECRET, "a").encode("b", named)
    )


def test_regions_of_many_kinds_of_blocks_share_what_is_the_same() -> None:
    kinds = [np.arange(100, dtype=np.int64) * 4096 + shift for shift in (0, 64, 128)]
    segments = [
        Segments(layer, layer, 64, kinds[layer % 3], kinds[layer % 3]) for layer in range(30)
    ]
    (part,) = cut_into_parts(1, segments)
    assert [group.table for group in part.groups] == [0, 1, 2] * 10


def test_a_part_that_names_offsets_it_does_not_have_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        _ = SegmentPart(1, 0, (), (SegmentGroup(0, 64, 0),)).num_segments


def test_a_message_reaches_whom_it_is_for_once() -> None:
    ours, theirs = NotificationCodec(SECRET, "ours"), NotificationCodec(SECRET, "theirs")
    messages: list[BounceMessage] = [InitiatorProgress(1, 5, 2.0), TransferEnded(2, "why")]
    (note,) = ours.encode("theirs", messages)
    envelope = theirs.decode(note)
    assert (envelope.sender, list(envelope.messages)) == ("ours", messages)
    for again in (note, *NotificationCodec(SECRET, "ours").encode("theirs", messages)):
        with pytest.raises(RemoteProtocolError):
            theirs.decode(again)
    with pytest.raises(RemoteProtocolError):
        NotificationCodec(SECRET, "others").decode(note)
    with pytest.raises(RemoteProtocolError):
        NotificationCodec(b"another secret", "theirs").decode(note)


def test_the_longest_messages_fit_and_short_ones_travel_together() -> None:
    ours = NotificationCodec(SECRET, "ours")
    ask = SlotRequest(1, 0.0, True, 1, 1, 1, bytes(MAX_METADATA_BYTES))
    messages: list[BounceMessage] = [
        ask,
        ask,
        *(InitiatorProgress(number, 1 << 60, 1e300) for number in range(300)),
    ]
    notes = list(ours.encode("theirs", messages))
    assert len(notes) == 3
    assert max(len(note) for note in notes) <= MAX_ENVELOPE_BYTES
    theirs = NotificationCodec(SECRET, "theirs")
    small: BounceMessage = SlotRequest(1, 0.0, True, 1, 1, 1, bytes(9))
    parts = cut_into_parts(1, [_blocks(4096)])
    assert len(list(ours.encode("others", [small, *parts]))) == 1
    assert [message for note in notes for message in theirs.decode(note).messages] == messages


@given(st.binary(max_size=200))
def test_whatever_else_is_sent_is_refused(junk: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        NotificationCodec(SECRET, "ours").decode(junk)


@given(
    st.recursive(
        st.none() | st.integers() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=20,
    )
)
def test_what_a_member_sends_is_a_message_or_refused(content: object) -> None:
    key = hmac.digest(SECRET, b"kvferry staged nixl notifications", hashlib.sha256)
    try:
        payload = msgspec.msgpack.encode(content)
    except OverflowError:
        return
    with pytest.raises(RemoteProtocolError):
        NotificationCodec(SECRET, "ours").decode(
            hmac.digest(key, b"ours\0" + payload, hashlib.sha256) + payload
        )


def test_messages_of_another_version_are_refused() -> None:
    key = hmac.digest(SECRET, b"kvferry staged nixl notifications", hashlib.sha256)
    for version, is_ours in ((BOUNCE_VERSION, True), (BOUNCE_VERSION - 1, False)):
        payload = msgspec.msgpack.encode(Envelope(version, "theirs", 1, ()))
        note = hmac.digest(key, b"ours\0" + payload, hashlib.sha256) + payload
        if is_ours:
            assert NotificationCodec(SECRET, "ours").decode(note).sender == "theirs"
        else:
            with pytest.raises(RemoteProtocolError):
                NotificationCodec(SECRET, "ours").decode(note)


def _offsets(part: SegmentPart, group: SegmentGroup) -> list[int]:
    return list(part.tables[group.table].offsets().tolist())


def _blocks(count: int) -> Segments:
    blocks = np.random.default_rng(1).permutation(count).astype(np.int64) * 4096
    return Segments(0, 0, 4096, blocks, blocks)
