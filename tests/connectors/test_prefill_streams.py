"""Tests that `PrefillStreams` derives the progress of a prefill from the scheduled slices, and
detects when a prefill has lost its blocks.
"""

from tests.connectors.pair import EngineRequest, Slice

from kvferry.connectors.contract import KVCacheGroup, RequestStatus
from kvferry.connectors.nixl.push_mode import PrefillStreams
from kvferry.protocol.tickets import NO_BLOCK
from kvferry.types import BlockIds, RequestId

R = RequestId("r")


FULL, WINDOW = KVCacheGroup(("f",)), KVCacheGroup(("w",), sliding_window=4)


def is_lost(streams: PrefillStreams, *tables: tuple[int, ...]) -> bool:
    """Whether the stream is withdrawn in a step that continues the request with these block tables,
    or, without tables, in a step that does not schedule it.
    """
    return bool(streams.withdraw_lost([Slice(R, 8, tables)] if tables else []))


def streams_of(
    num_tokens: int = 10, groups: tuple[KVCacheGroup, ...] = (FULL,)
) -> tuple[PrefillStreams, EngineRequest]:
    streams, request = PrefillStreams(4, groups), EngineRequest(R, list(range(num_tokens)))
    streams.add(request, "h1")
    return streams, request


def advance(
    streams: PrefillStreams, start: int, *tables: tuple[int, ...]
) -> list[tuple[int, BlockIds]]:
    slices = [Slice("other", 8, ((1, 2),)), Slice(R, start, tables)]
    return [(stream.num_published, stream.blocks) for stream, _ in streams.advance(slices)]


def test_full_blocks_of_earlier_steps_are_published_once() -> None:
    streams, _ = streams_of()
    assert advance(streams, 0, (5, 6, 7)) == []
    assert advance(streams, 3, (5, 6, 7)) == []
    assert advance(streams, 6, (5, 6, 7)) == [(4, ((5, NO_BLOCK, NO_BLOCK),))]
    assert advance(streams, 7, (5, 6, 7)) == []
    assert advance(streams, 8, (5, 6, 7)) == [(8, ((5, 6, NO_BLOCK),))]


def test_blocks_that_a_window_has_left_behind_are_holes_and_stay_so() -> None:
    streams, _ = streams_of(groups=(FULL, WINDOW))
    assert advance(streams, 8, (5, 6, 7), (NO_BLOCK, 9, 10)) == [
        (8, ((5, 6, NO_BLOCK), (NO_BLOCK, 9, NO_BLOCK)))
    ]


def test_blocks_that_a_window_will_leave_behind_are_never_published() -> None:
    """The engine frees these blocks in the middle of the prompt without notice. The last of 20
    tokens attends to block 4 and later blocks.
    """
    streams, _ = streams_of(20, groups=(FULL, WINDOW))
    table = (5, 6, 7, 8, 9)
    assert advance(streams, 8, table, table) == [
        (8, ((5, 6, NO_BLOCK, NO_BLOCK, NO_BLOCK), (NO_BLOCK,) * 5))
    ]
    assert advance(streams, 19, table, (NO_BLOCK, NO_BLOCK, 7, 8, 9)) == [
        (16, ((5, 6, 7, 8, NO_BLOCK), (NO_BLOCK,) * 5))
    ]


def test_of_each_advance_what_is_new_is_known_and_at_the_end_what_was_never_published() -> None:
    streams, _ = streams_of(18, groups=(FULL, WINDOW))
    full, window = (5, 6, 7, 8, 9), (NO_BLOCK, 2, 3, 4, 1)
    slices = [Slice(R, start, (full, window)) for start in (4, 14, 16)]
    new = [new for each in slices for _, new in streams.advance([each])]
    assert new == [((5,), (NO_BLOCK,)), ((6, 7), (NO_BLOCK, NO_BLOCK)), ((8,), (4,))]
    stream = streams.get(R)
    assert stream is not None
    assert stream.unpublished(([*full], [NO_BLOCK, NO_BLOCK, 3, 4, 1])) == (
        (9,),
        (3, 1),
    ), "the engine may keep more than it must"


def test_output_is_not_published() -> None:
    streams, _ = streams_of(8)
    assert advance(streams, 8, (5, 6, 7)) == []


def test_a_preempted_prefill_is_withdrawn_once_and_published_anew() -> None:
    streams, request = streams_of()
    request.num_computed_tokens = 8
    advance(streams, 8, (5, 6, 7))
    assert not is_lost(streams)
    request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
    assert is_lost(streams)
    assert not is_lost(streams)
    assert advance(streams, 4, (1, 2, 3)) == [(4, ((1, NO_BLOCK, NO_BLOCK),))]


def test_a_prefill_taken_up_again_with_other_blocks_is_withdrawn_though_it_has_as_many_tokens() -> (
    None
):
    streams, request = streams_of()
    advance(streams, 8, (5, 6, 7))
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    assert not is_lost(streams, (5, 6, 7))
    assert not is_lost(streams, (5, 6, 1)), "block 7 was not published yet"
    assert is_lost(streams, (5, 1, 7))
    assert not is_lost(streams, (5, 1, 7))


def test_a_prefill_that_has_outrun_its_window_is_not_withdrawn() -> None:
    streams, request = streams_of(groups=(FULL, WINDOW))
    advance(streams, 8, (5, 6, 7), (8, 9, 10))
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, 8
    assert not is_lost(streams, (5, 6, 7), (NO_BLOCK, 9, 10))
    assert is_lost(streams, (5, 6, 7), (NO_BLOCK, 1, 10))


def test_an_engine_that_lets_go_of_what_the_last_token_sees_is_found_out() -> None:
    """With a window of 4 tokens in blocks of 4, the last of 10 tokens attends to tokens 6 to 9; the
    token before it also attends to block 1.
    """
    streams, _ = streams_of(groups=(FULL, WINDOW))
    advance(streams, 8, (5, 6, 7), (8, 9, 10))
    stream = streams.get(R)
    assert stream is not None
    assert not stream.has_lost_blocks(([5, 6, 7], [NO_BLOCK, 9, 10]))
    assert stream.has_lost_blocks(([5, 6, 7], [NO_BLOCK, NO_BLOCK, 10]))
    assert stream.has_lost_blocks(([5, 1, 7], [NO_BLOCK, 9, 10]))


def test_an_ended_prefill_is_forgotten() -> None:
    streams, _ = streams_of()
    advance(streams, 8, (5, 6, 7))
    assert streams.end(R) is not None
    assert (streams.end(R), len(streams)) == (None, 0)
    assert (advance(streams, 8, (5, 6, 7)), is_lost(streams)) == ([], False)
