import string
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RequestRefused
from kvferry.router.http.messages import InvalidResponse
from kvferry.router.http.parsing import (
    BodyKind,
    check_partial_head,
    read_request_head,
    read_response_head,
)

NAMES = st.text(
    string.ascii_letters + string.digits + "!#$%&'*+-.^_`|~", min_size=1, max_size=20
).filter(
    lambda name: (
        name.lower() not in ("host", "content-length", "transfer-encoding", "connection", "expect")
    )
)
VALUES = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=30).map(
    lambda value: value.strip(" \t")
)
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=20)


def head_of(fields: list[tuple[str, str]], line: str = "POST /a?b HTTP/1.1") -> bytes:
    return "".join(
        [line, "\r\n", *(f"{name}: {value}\r\n" for name, value in fields), "\r\n"]
    ).encode("latin-1")


@given(FIELDS)
def test_fields_are_read_as_they_were_sent(fields: list[tuple[str, str]]) -> None:
    sent = [("Host", "h"), *fields]
    head = read_request_head(head_of(sent), 100)
    assert list(head.headers.items()) == sent
    assert (head.method, head.path, head.query) == ("POST", "/a", "b")


def test_names_are_compared_without_case_and_one_names_fields_are_joined() -> None:
    head = read_request_head(head_of([("hOST", "h"), ("X-a", "1"), ("x-A", "2")]), 100)
    assert (head.headers.get("host"), head.headers.get("x-a"), head.headers.get("x-b")) == (
        "h",
        "1, 2",
        None,
    )


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_an_error_and_nothing_else(data: bytes) -> None:
    for read in (
        lambda: read_request_head(data + b"\r\n\r\n", 100),
        lambda: read_response_head(data + b"\r\n\r\n", "GET"),
    ):
        with suppress(RequestRefused, InvalidResponse):
            read()


@given(
    FIELDS,
    st.integers(0, 500),
    st.sampled_from(
        [
            b"\r",
            b"\n",
            b"\0",
            b"\x7f",
            b"\n ",
            b"\r\n ",
            b"\r\n\t",
            b"\r\n: x",
            b"\r\nx : y",
            b"\x0b",
        ]
    ),
)
def test_a_head_with_anything_foreign_in_it_is_refused(
    fields: list[tuple[str, str]], at: int, foreign: bytes
) -> None:
    head = head_of([("Host", "h"), *fields])
    at %= len(head) - 2
    spoilt = head[:at] + foreign + head[at:]
    if not spoilt.endswith(b"\r\n\r\n") or b"\r\n\r\n" in spoilt[:-4]:
        return  # the inserted bytes ended the head early, or kept it from ending
    with pytest.raises(RequestRefused):
        read_request_head(spoilt, 100)


REFUSED = {
    "no version": b"GET /\r\nHost: h\r\n\r\n",
    "another version": b"GET / HTTP/2.0\r\nHost: h\r\n\r\n",
    "HTTP/1.2": b"GET / HTTP/1.2\r\nHost: h\r\n\r\n",
    "lower-case version": b"GET / http/1.1\r\nHost: h\r\n\r\n",
    "two blanks": b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n",
    "a blank at the end of the line": b"GET / HTTP/1.1 \r\nHost: h\r\n\r\n",
    "a blank in the path": b"GET /a b HTTP/1.1\r\nHost: h\r\n\r\n",
    "a tab between": b"GET\t/ HTTP/1.1\r\nHost: h\r\n\r\n",
    "no slash": b"GET a HTTP/1.1\r\nHost: h\r\n\r\n",
    "a fragment": b"GET /a#b HTTP/1.1\r\nHost: h\r\n\r\n",
    "a star that is not for OPTIONS": b"GET * HTTP/1.1\r\nHost: h\r\n\r\n",
    "CONNECT": b"CONNECT a:1 HTTP/1.1\r\nHost: h\r\n\r\n",
    "letters beyond ASCII in the path": b"GET /\xe4 HTTP/1.1\r\nHost: h\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "a folded line": b"GET / HTTP/1.1\r\nHost: h\r\nX: a\r\n b\r\n\r\n",
    "a folded first line": b"GET / HTTP/1.1\r\n X: a\r\nHost: h\r\n\r\n",
    "a blank before the colon": b"GET / HTTP/1.1\r\nHost: h\r\nX : a\r\n\r\n",
    "no colon": b"GET / HTTP/1.1\r\nHost: h\r\nX\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\nHost: h\r\n: a\r\n\r\n",
    "a bare LF": b"GET / HTTP/1.1\r\nHost: h\nX: a\r\n\r\n",
    "a bare CR": b"GET / HTTP/1.1\r\nHost: h\rX: a\r\n\r\n",
    "a bare CR at the end of a value": b"GET / HTTP/1.1\r\nHost: h\r\r\n\r\n",
    "NUL in a value": b"GET / HTTP/1.1\r\nHost: h\0\r\n\r\n",
    "NUL in a name": b"GET / HTTP/1.1\r\nHost: h\r\nX\0: 1\r\n\r\n",
    "a line end of lines only by LF": b"GET / HTTP/1.1\nHost: h\n\r\n\r\n",
}


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED.keys())
def test_a_request_that_is_not_exactly_http_is_refused(head: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_request_head(head, 100)
    assert caught.value.status == 400


SMUGGLED = {
    "both lengths": b"Content-Length: 5\r\nTransfer-Encoding: chunked",
    "both lengths, the other way round": b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6",
    "two equal lengths": b"Content-Length: 5\r\nContent-Length: 5",
    "a list of lengths": b"Content-Length: 5, 5",
    "a signed length": b"Content-Length: +5",
    "a negative length": b"Content-Length: -5",
    "a hexadecimal length": b"Content-Length: 0x5",
    "a length with an underscore": b"Content-Length: 1_0",
    "a length in other digits": b"Content-Length: \xb2",
    "an empty length": b"Content-Length:",
    "a fraction": b"Content-Length: 5.0",
    "an endless length": b"Content-Length: " + b"9" * 400,
    "another coding": b"Transfer-Encoding: gzip",
    "chunked is not the last": b"Transfer-Encoding: chunked, gzip",
    "chunked after another": b"Transfer-Encoding: gzip, chunked",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "identity": b"Transfer-Encoding: identity",
    "a vertical tab before chunked": b"Transfer-Encoding: \x0bchunked",
    "chunked in quotes": b'Transfer-Encoding: "chunked"',
    "an empty coding": b"Transfer-Encoding:",
    "a folded coding": b"Transfer-Encoding:\r\n chunked",
    "a blank before the colon": b"Transfer-Encoding : chunked",
    "a name that only looks alike": b"Transfer-Encoding\xa0: chunked",
    "a bare LF before the coding": b"X: y\nTransfer-Encoding: chunked",
    "a bare CR before the coding": b"X: y\rTransfer-Encoding: chunked",
}


@pytest.mark.parametrize("fields", SMUGGLED.values(), ids=SMUGGLED.keys())
def test_a_body_whose_length_could_be_read_in_two_ways_is_refused(fields: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        read_request_head(b"POST / HTTP/1.1\r\nHost: h\r\n" + fields + b"\r\n\r\n", 100)
    assert caught.value.status == 400
    answer = b"HTTP/1.1 200 OK\r\n" + fields + b"\r\n\r\n"
    with pytest.raises(InvalidResponse):
        read_response_head(answer, "GET")


def test_http_1_0_has_no_chunks() -> None:
    with pytest.raises(RequestRefused):
        read_request_head(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 100)
    assert (
        read_request_head(
            b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: Chunked\r\n\r\n", 100
        ).body
        is BodyKind.CHUNKED
    )


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", ""),
        ("/a%20b/?c=d?e", "/a%20b/", "c=d?e"),
        ("http://h/a?b", "/a", "b"),
        ("HTTPS://h:1?b", "/", "b"),
        ("http://h", "/", ""),
        ("//double", "//double", ""),
    ],
)
def test_targets_are_split_and_kept_as_sent(target: str, path: str, query: str) -> None:
    head = read_request_head(f"GET {target} HTTP/1.1\r\nHost: h\r\n\r\n".encode(), 100)
    assert (head.path, head.query) == (path, query)


@pytest.mark.parametrize(
    ("version", "connection", "keeps_alive"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Keep-Alive, Close", False),
        ("1.1", "x-close", True),
        ("1.0", None, False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "keep-alive, close", False),
    ],
)
def test_who_keeps_a_connection(version: str, connection: str | None, keeps_alive: bool) -> None:
    fields = [("Host", "h")] + ([("Connection", connection)] if connection is not None else [])
    assert (
        read_request_head(head_of(fields, f"GET / HTTP/{version}"), 100).keeps_alive is keeps_alive
    )


def test_too_many_fields_and_unknown_expectations_have_statuses_of_their_own() -> None:
    with pytest.raises(RequestRefused) as caught:
        read_request_head(head_of([("Host", "h")] + [("X", "1")] * 10), 10)
    assert caught.value.status == 431
    assert len(read_request_head(head_of([("Host", "h")] + [("X", "1")] * 9), 10).headers) == 10
    with pytest.raises(RequestRefused) as caught:
        read_request_head(head_of([("Host", "h"), ("Expect", "tea")]), 10)
    assert caught.value.status == 417


@given(FIELDS, st.data())
def test_the_beginning_of_a_head_is_never_refused(
    fields: list[tuple[str, str]], data: st.DataObject
) -> None:
    head = head_of([("Host", "h"), *fields])
    cut = data.draw(st.integers(1, len(head)))
    check_partial_head(head[:cut])


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00",
        b"\x00",
        b"GET /\x00",
        b"{",
        b"GET / HTTP/2",
        b"GET / FTP",
        b"SSH-2.0-x\r\n",
        b"\n",
    ],
)
def test_what_cannot_become_a_head_is_refused_at_its_first_bytes(garbage: bytes) -> None:
    with pytest.raises(RequestRefused):
        check_partial_head(garbage)


@pytest.mark.parametrize(
    ("method", "head", "kind"),
    [
        ("GET", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", BodyKind.LENGTH),
        ("GET", b"HTTP/1.1 200\r\nTransfer-Encoding: chunked\r\n\r\n", BodyKind.CHUNKED),
        ("GET", b"HTTP/1.0 200 \r\n\r\n", BodyKind.UNTIL_CLOSE),
        ("HEAD", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", BodyKind.NONE),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n", BodyKind.NONE),
        ("GET", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", BodyKind.NONE),
        ("GET", b"HTTP/1.1 100 Continue\r\n\r\n", BodyKind.NONE),
    ],
)
def test_how_an_answers_end_is_told(method: str, head: bytes, kind: BodyKind) -> None:
    assert read_response_head(head, method).body is kind


@pytest.mark.parametrize(
    "line",
    [
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000",
        b"HTTP/1.1 099 x",
        b"ICY 200 OK",
        b"HTTP/1.1  200 OK",
        b"200 OK",
        b"HTTP/1.1 200 OK\r\rX: y",
    ],
)
def test_a_status_line_that_is_not_exactly_http_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read_response_head(line + b"\r\nContent-Length: 0\r\n\r\n", "GET")
