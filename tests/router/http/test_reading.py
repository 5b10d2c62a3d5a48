from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.http.kit import LIMITS, chunked, post

from kvferry.errors import RequestRefused
from kvferry.router.http.framing import RequestReader
from kvferry.router.http.messages import ServerLimits

BODIES = st.lists(st.binary(max_size=60), min_size=1, max_size=4)


@dataclass
class Reading:
    """Drives a `RequestReader` as a connection does."""

    reader: RequestReader
    is_in_body: bool = False

    def feed(self, data: bytes) -> list[tuple[str, bytes]]:
        self.reader.add(data)
        taken: list[tuple[str, bytes]] = []
        while True:
            if not self.is_in_body:
                head = self.reader.take_head()
                if head is None:
                    return taken
                self.path = head.path
                self.is_in_body = True
            body = self.reader.take_body()
            if body is None:
                return taken
            taken.append((self.path, bytes(body)))
            self.is_in_body = False


def read_all(parts: list[bytes], limits: ServerLimits = LIMITS) -> list[tuple[str, bytes]]:
    reading = Reading(RequestReader(limits))
    return [request for part in parts for request in reading.feed(part)]


@st.composite
def conversation(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, bytes]]]:
    """Consecutive requests with bodies of each kind, and their expected paths and bodies."""
    raw, said = b"", list[tuple[str, bytes]]()
    for number, body in enumerate(draw(BODIES)):
        path = f"/{number}"
        kind = draw(st.sampled_from(["length", "chunked", "none"]))
        raw += draw(st.sampled_from([b"", b"\r\n", b"\r\n\r\n"]))
        if kind == "length":
            raw += post(body, path)
        elif kind == "chunked":
            size = draw(st.integers(1, 20))
            chunks = [body[i : i + size] for i in range(0, len(body), size)]
            raw += (
                b"POST %b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
                + chunked(chunks)
            )
        else:
            body = b""
            raw += b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % path.encode()
        said.append((path, body))
    return raw, said


@given(conversation(), st.lists(st.integers(0, 2000), max_size=40))
def test_requests_cut_anywhere_are_the_same_requests(
    sent: tuple[bytes, list[tuple[str, bytes]]], cuts: list[int]
) -> None:
    raw, said = sent
    edges = [0, *sorted(position % (len(raw) + 1) for position in cuts), len(raw)]
    assert read_all([raw[start:end] for start, end in pairwise(edges) if end > start]) == said


@given(conversation())
def test_requests_byte_by_byte_are_the_same_requests(
    sent: tuple[bytes, list[tuple[str, bytes]]],
) -> None:
    assert read_all([bytes([byte]) for byte in sent[0]]) == sent[1]


@given(st.lists(st.binary(max_size=80), max_size=5))
def test_any_bytes_are_requests_or_a_refusal_and_nothing_else(parts: list[bytes]) -> None:
    with suppress(RequestRefused):
        read_all(parts)


def test_a_head_of_the_greatest_length_is_read_and_a_longer_one_is_not() -> None:
    limits = replace(LIMITS, head_bytes=200)
    for pad, is_read in ((100, True), (200, False), (10_000, False)):
        raw = b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"a" * pad + b"\r\n\r\n"
        for parts in ([raw], [raw[i : i + 7] for i in range(0, len(raw), 7)]):
            if is_read:
                assert read_all(parts, limits) == [("/", b"")]
            else:
                with pytest.raises(RequestRefused) as caught:
                    read_all(parts, limits)
                assert caught.value.status == 431


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_of_the_greatest_length_is_read_and_a_longer_one_is_not(is_chunked: bool) -> None:
    limits = replace(LIMITS, body_bytes=100)
    for size in (100, 101):
        body = b"a" * size
        raw = (
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
            + chunked([body[:50], body[50:]])
            if is_chunked
            else post(body)
        )
        if size == 100:
            assert read_all([raw], limits)[0][1] == body
        else:
            with pytest.raises(RequestRefused) as caught:
                read_all([raw], limits)
            assert caught.value.status == 413


def test_an_endless_line_of_empty_lines_is_no_head() -> None:
    assert read_all([b"\r\n" * 10_000, post(b"x")]) == [("/v1/x", b"x")]
