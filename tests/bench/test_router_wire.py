"""Tests the HTTP parser of the router benchmark: it reassembles messages however the bytes are cut,
and refuses bytes that are not a message.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench.router.http1 import MalformedHttp, ResponseReader, StubRequestReader

PLAIN = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;name=value\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
)
BARE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWERS = {
    "with a length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    "in chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "after a continue": b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
}


def cut(message: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % len(message) for place in places} | {0, len(message)})
    return [message[start:end] for start, end in pairwise(ends)]


places = st.lists(st.integers(min_value=0, max_value=10_000), max_size=12)


@given(places)
def test_requests_come_whole_and_in_order_however_they_are_cut(where: list[int]) -> None:
    reader = StubRequestReader()
    found = [
        request
        for segment in cut(PLAIN + BARE + CHUNKED + PLAIN, where)
        for request in reader.feed(segment)
    ]
    post = b"POST /v1/completions HTTP/1.1"
    assert [(request.line, request.body) for request in found] == [
        (post, b"hello"),
        (b"GET /health HTTP/1.1", b""),
        (post, b"hello"),
        (post, b"hello"),
    ]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@given(where=places)
def test_an_answer_comes_whole_however_it_is_cut(answer: bytes, where: list[int]) -> None:
    reader = ResponseReader()
    for _ in range(2):
        found = [
            whole for segment in cut(answer, where) if (whole := reader.feed(segment)) is not None
        ]
        assert [(whole.status, whole.body, whole.keeps_alive) for whole in found] == [
            (200, b"hello", True)
        ]


def test_a_sender_that_asks_first_is_told_to_go_on() -> None:
    reader = StubRequestReader()
    assert (
        reader.feed(b"POST / HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n") == []
    )
    assert reader.wants_continue
    assert [request.body for request in reader.feed(b"hello")] == [b"hello"]
    assert not reader.wants_continue


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhel") is None
    assert reader.feed(b"lo") is None
    answer = reader.end()
    assert answer is not None
    assert (answer.body, answer.keeps_alive) == (b"hello", False)


def test_an_answer_with_a_length_does_not_end_with_its_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel") is None
    assert reader.end() is None


def test_text_that_looks_like_the_last_chunk_does_not_end_an_answer() -> None:
    reader = ResponseReader()
    assert (
        reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\na\r\ndata:0\r\n\r\n")
        is None
    )
    answer = reader.feed(b"\r\n0\r\n\r\n")
    assert answer is not None
    assert answer.body == b"data:0\r\n\r\n"


def test_the_head_alone_is_no_byte_of_the_body() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    assert not reader.has_body
    reader.feed(b"5\r\nhel")
    assert reader.has_body


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
    ],
    ids=["no HTTP", "no length", "no chunk", "more than it says"],
)
def test_what_is_no_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(MalformedHttp):
        ResponseReader().feed(answer)
