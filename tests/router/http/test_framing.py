import gc
import sys
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.http.kit import chunked

from kvferry.router.http.framing import (
    ChunkedBody,
    FramingError,
    LengthBody,
    UntilCloseBody,
    chunk,
    first_chunk,
)

CHUNKS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(position % (len(data) + 1) for position in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@st.composite
def wire(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A chunked body in any legal spelling, and the decoded body."""
    chunks = draw(CHUNKS)
    spellings = [b"%x", b"%X", b"00%x", b"%x;name=value", b'%x ; name="a b"']
    body = b"".join(
        draw(st.sampled_from(spellings)) % len(data) + b"\r\n" + data + b"\r\n" for data in chunks
    )
    end = draw(
        st.sampled_from(
            [b"0\r\n\r\n", b"000\r\n\r\n", b"0;x\r\n\r\n", b"0\r\nTrailer: yes\r\nOther: \r\n\r\n"]
        )
    )
    return body + end, b"".join(chunks)


@given(wire(), st.lists(st.integers(0, 1000), max_size=30), st.binary(max_size=10))
def test_a_chunked_body_cut_anywhere_is_the_same_and_ends_at_the_same_byte(
    sent: tuple[bytes, bytes], cuts: list[int], rest: bytes
) -> None:
    raw, said = sent
    for is_decoded in (True, False):
        body = ChunkedBody()
        decoded: list[bytes] | None = [] if is_decoded else None
        used = 0
        for part in cut(raw, cuts):
            assert not body.is_ended or not part
            used += body.advance(part, decoded)
        assert body.is_ended
        assert used == len(raw)
        assert body.advance(rest, decoded) == 0
        assert decoded is None or b"".join(decoded) == said


@given(wire(), st.binary(max_size=10))
def test_what_follows_the_end_is_not_the_bodys(sent: tuple[bytes, bytes], rest: bytes) -> None:
    body = ChunkedBody()
    assert body.advance(sent[0] + rest, None) == len(sent[0])


@given(wire(), st.data())
def test_a_body_that_was_cut_off_has_not_ended(
    sent: tuple[bytes, bytes], data: st.DataObject
) -> None:
    body = ChunkedBody()
    body.advance(sent[0][: data.draw(st.integers(0, len(sent[0]) - 1))], None)
    assert not body.is_ended


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=6))
def test_any_bytes_are_chunks_or_an_error_and_nothing_else_however_they_are_cut(
    data: bytes, cuts: list[int]
) -> None:
    assert outcome([data]) == outcome(cut(data, cuts))


def outcome(parts: list[bytes]) -> tuple[str, bytes]:
    body, decoded = ChunkedBody(), list[bytes]()
    try:
        for part in parts:
            body.advance(part, decoded)
    except FramingError:
        return "refused", b""  # how much was decoded before may depend on the cuts, and is dropped
    return ("ended" if body.is_ended else "open"), b"".join(decoded)


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n",
        b"0x5\r\nhello\r\n0\r\n\r\n",
        b"+5\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"5 \r\nhello\r\n",
        b"1_0\r\nhello\r\n",
        b"g\r\n",
        b"5\nhello\r\n",
        b"5\rhello\r\n",
        b"5\r\nhelloX\r\n",
        b"5\r\nhello\n",
        b"5\r\nhello0\r\n\r\n",
        b"5;a\nb\r\nhello\r\n",
        b"5;\0\r\nhello\r\n",
        b"\xb2\r\n",
        b"1" * 16 + b"\r\n",
        b"0" * 5000,
        b"5;" + b"a" * 5000,
        b"0\r\nno trailer\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nX : y\r\n\r\n",
        b"0\r\n" + b"X: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 1000,
    ],
)
def test_chunks_that_could_be_read_in_two_ways_are_refused(raw: bytes) -> None:
    assert outcome([raw])[0] == "refused"
    assert outcome([raw[i : i + 1] for i in range(len(raw))])[0] == "refused"


@pytest.mark.parametrize(
    "raw",
    [
        b"0\r\n" + b"a:\r\n" * 10_000 + b"\r\n",
        b"0" * 100_000 + b"5\r\nhello\r\n0\r\n\r\n",
        b"1\r\nx\r\n0\r\nA: " + b"a" * 60_000,
    ],
)
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_the_limits_of_size_lines_and_trailers_hold_however_the_bytes_are_cut(
    raw: bytes, step: int
) -> None:
    assert outcome([raw[at : at + step] for at in range(0, len(raw), step)])[0] == "refused"


def test_a_body_that_has_not_ended_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        body = ChunkedBody()
        body.advance(b"5\r\nhello\r\n", [])
        del body
        assert not any(type(each) is ChunkedBody for each in gc.get_objects())
    finally:
        gc.enable()


def num_steps(raw: bytes) -> int:
    """The number of lines of the parser that run for a whole body."""
    steps = 0

    def count(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return count

    body = ChunkedBody()
    before = sys.gettrace()
    sys.settrace(count)
    try:
        body.advance(raw, [])
    finally:
        sys.settrace(before)
    assert body.is_ended
    return steps


def test_line_ends_in_data_cost_no_more_steps_than_other_bytes() -> None:
    """A client must not be able to make the router busy."""

    def filled(fill: bytes) -> bytes:
        return b"10000\r\n" + fill * (0x10000 // len(fill)) + b"\r\n0\r\n\r\n"

    assert num_steps(filled(b"\r\n")) == num_steps(filled(b"x"))


def test_no_client_can_make_the_chunks_of_others_cost_more_steps() -> None:
    """The parser may look sizes up, but one client's sizes must not take the places of others."""

    def later_steps(size: int) -> int:
        raw = chunked([b"x" * size] * 100)
        num_steps(raw)  # a parser that remembers sizes knows this size from now on
        return num_steps(raw)

    before = later_steps(0xABC)
    ChunkedBody().advance(b"".join(b"1;%x\r\nx\r\n" % name for name in range(5000)), None)
    assert later_steps(0xABD) == before


@given(CHUNKS, st.data())
def test_whether_another_chunk_could_begin_is_known_at_every_byte(
    chunks: list[bytes], data: st.DataObject
) -> None:
    raw = chunked(chunks)
    at = data.draw(st.integers(0, len(raw)))
    body = ChunkedBody()
    body.advance(raw[:at], None)
    edges = [0]
    for one in chunks:
        edges.append(edges[-1] + len(chunk(one)))
    assert body.is_at_boundary == (at in edges)


@given(CHUNKS, st.data())
def test_a_body_read_in_part_can_go_on_raw(chunks: list[bytes], data: st.DataObject) -> None:
    raw = chunked(chunks)
    at = data.draw(st.integers(0, len(raw)))
    body, start = ChunkedBody(), list[bytes]()
    body.advance(raw[:at], start)
    prefix = body.resume_raw(b"".join(start))
    if prefix is None:
        assert not body.is_at_boundary  # the cut is inside a line
        return
    again, decoded = ChunkedBody(), list[bytes]()
    again.advance(prefix + raw[at:], decoded)
    assert again.is_ended
    assert b"".join(decoded) == b"".join(chunks)


@given(st.binary(min_size=1, max_size=40), st.binary(max_size=10))
def test_the_first_chunk_is_found_without_decoding_the_rest(data: bytes, rest: bytes) -> None:
    assert first_chunk(chunk(data) + rest) == data
    assert first_chunk(chunk(data)[:-3]) is None


@given(st.binary(max_size=50), st.binary(max_size=10), st.lists(st.integers(0, 100), max_size=6))
def test_a_body_of_known_length_ends_there(said: bytes, rest: bytes, cuts: list[int]) -> None:
    body, decoded = LengthBody(len(said)), list[bytes]()
    used = sum(body.advance(part, decoded) for part in cut(said + rest, cuts))
    assert (used, b"".join(decoded), body.is_ended) == (len(said), said, True)


def test_a_body_until_close_never_ends_by_itself() -> None:
    body, decoded = UntilCloseBody(), list[bytes]()
    assert body.advance(b"0\r\n\r\n", decoded) == 5
    assert (decoded, body.is_ended, body.is_complete_at_close) == ([b"0\r\n\r\n"], False, True)
