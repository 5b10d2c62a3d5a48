"""Parses the heads of HTTP/1.1 messages, strictly.

httptools (llhttp) parses the bytes; this module adapts it and refuses what httptools accepts
although another server could read it differently, see docs/decisions/031-router-http.md. Pure.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from httptools import (
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
    HttpResponseParser,
)

from kvferry.errors import RequestRefused
from kvferry.router.http.messages import Headers, InvalidResponse

_ABSOLUTE = re.compile(r"[Hh][Tt][Tt][Pp][Ss]?://[^/?#]+([/?].*)?")
_MAX_LENGTH_DIGITS = 15
_MAX_KNOWN_HEAD = 512
"""Longest response head that is cached; bounds the cache in bytes."""


class BodyKind(IntEnum):
    """How the end of a received body is marked."""

    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    UNTIL_CLOSE = 3


_NONE, _LENGTH, _CHUNKED = (
    BodyKind.NONE,
    BodyKind.LENGTH,
    BodyKind.CHUNKED,
)  # module constants, because reading an enum member is slow in Python 3.11


@dataclass(slots=True)
class RequestHead:
    """Parsed head of a request."""

    method: str
    path: str
    query: str
    headers: Headers
    body: BodyKind
    length: int
    """Length of the body if known, else 0."""
    is_http11: bool
    keeps_alive: bool
    expects_continue: bool

    @property
    def has_body(self) -> bool:
        return self.body is not _NONE


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Parsed head of a response."""

    status: int
    headers: Headers
    body: BodyKind
    length: int
    keeps_alive: bool


def read_request_head(data: bytes, max_fields: int) -> RequestHead:
    """Parse a request head. `data` ends with the empty line. RequestRefused if it is not valid."""
    found = _FoundHead()
    parser = HttpRequestParser(found)
    try:
        parser.feed_data(data)
    except HttpParserUpgrade:
        pass  # the client offers another protocol; the router answers in HTTP/1.1
    except HttpParserError as error:
        raise RequestRefused(f"the request is not valid HTTP: {error}") from None
    method, target = parser.get_method(), found.target
    # httptools also accepts several blanks, RTSP, HTTP/2.0, no version, and empty lines before.
    line = b"%b %b HTTP/1." % (method, target)
    version = data[len(line) : len(line) + 3]
    if not data.startswith(line) or version not in (b"0\r\n", b"1\r\n") or not found.is_complete:
        raise RequestRefused("the request line is not valid HTTP")
    if len(found.fields) > max_fields:
        raise RequestRefused(f"the request has more than {max_fields} headers", status=431)
    headers, values = _decode_fields(found.fields)
    is_http11 = version[0] == 0x31
    host = values.get("host")
    if (host is None and is_http11) or (host is not None and "," in host):
        raise RequestRefused("the request must have one Host header")
    method_name = method.decode("latin-1")
    path, query = _split_target(target.decode("latin-1"), method_name)
    kind, length = _request_body(
        values.get("transfer-encoding"), values.get("content-length"), is_http11
    )
    return RequestHead(
        method_name,
        path,
        query,
        headers,
        kind,
        length,
        is_http11,
        keeps_alive=_keeps_alive(values.get("connection"), is_http11),
        expects_continue="expect" in values and _expects_continue(values["expect"]),
    )


def read_response_head(data: bytes, method: str) -> ResponseHead:
    """Parse a response head. `data` ends with the empty line; `method` is that of the request.

    Raises InvalidResponse if the head is not valid. Equal bytes may return the same object.
    """
    return (
        _known_response_head(data, method == "HEAD")
        if len(data) < _MAX_KNOWN_HEAD
        else _read_response_head(data, method == "HEAD")
    )


def _read_response_head(data: bytes, is_for_head: bool) -> ResponseHead:
    found = _FoundHead()
    parser = HttpResponseParser(found)
    try:
        parser.feed_data(data)
    except HttpParserUpgrade:
        raise InvalidResponse("it switched to another protocol without a request for it") from None
    except HttpParserError as error:
        raise InvalidResponse(f"its answer is not valid HTTP: {error}") from None
    if _has_bare_cr(data):
        raise InvalidResponse("its answer is not valid HTTP: a line end has no LF")
    status = parser.get_status_code()
    is_http11 = data.startswith(b"HTTP/1.1")
    # httptools also accepts RTSP, HTTP/0.9, HTTP/2.0, and statuses below 100.
    if not (is_http11 or data.startswith(b"HTTP/1.0")) or status < 100 or not found.is_complete:
        raise InvalidResponse("its status line is not valid HTTP")
    headers, values = _decode_fields(found.fields)
    keeps_alive = _keeps_alive(values.get("connection"), is_http11)
    coding, length = values.get("transfer-encoding"), values.get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked" or not is_http11):
        raise InvalidResponse("the Transfer-Encoding of its answer is not supported")
    if length is not None and not _is_length(length):
        raise InvalidResponse("the Content-Length of its answer is not one number")
    size = int(length) if length is not None else 0
    if is_for_head or status < 200 or status in (204, 304):
        return ResponseHead(status, headers, _NONE, size, keeps_alive)
    if coding is not None:
        return ResponseHead(status, headers, _CHUNKED, 0, keeps_alive)
    if length is not None:
        return ResponseHead(status, headers, _LENGTH, size, keeps_alive)
    return ResponseHead(status, headers, BodyKind.UNTIL_CLOSE, 0, False)


def check_partial_head(data: bytes) -> bool:
    """Check an incomplete head. True if its first line is complete and needs no further check.

    Raises RequestRefused as soon as the bytes cannot become a head (a TLS handshake, another
    protocol).
    """
    end = data.find(b"\n") + 1
    parser = HttpRequestParser(None)
    try:
        parser.feed_data(data[:end] if end else data)
    except HttpParserError as error:
        raise RequestRefused(f"the request line is not valid HTTP: {error}") from None
    # httptools also accepts line ends before a request and, until the line ends, any version. The
    # version is 0.0 while it is unknown.
    if data[:1] in (b"\r", b"\n") or parser.get_http_version() not in ("0.0", "1.0", "1.1"):
        raise RequestRefused("the request line is not valid HTTP")
    return end > 0


# An engine starts all streams of one second with the same head; heads of complete answers differ
# in their length.
_known_response_head = lru_cache(512)(_read_response_head)


class _FoundHead:
    """Collects what httptools finds in one head."""

    __slots__ = ("fields", "is_complete", "target")

    def __init__(self) -> None:
        self.target = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_url(self, target: bytes) -> None:
        self.target = target

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def _has_bare_cr(head: bytes) -> bool:
    """httptools before 0.9 ends a status line with CR CR."""
    return head.count(b"\r") != head.count(b"\r\n")


def _decode_fields(fields: list[tuple[bytes, bytes]]) -> tuple[Headers, dict[str, str]]:
    """The fields in their order, and by lower-case name."""
    pairs: list[tuple[str, str]] = []
    values: dict[str, str] = {}
    for raw_name, raw_value in fields:
        name = raw_name.decode("latin-1")
        key = name.lower()
        value = raw_value.decode("latin-1").strip(" \t")
        pairs.append((name, value))
        values[key] = f"{values[key]}, {value}" if key in values else value
    return Headers(pairs, values), values


def _request_body(coding: str | None, length: str | None, is_http11: bool) -> tuple[BodyKind, int]:
    if coding is not None:
        if length is not None or not is_http11:
            raise RequestRefused(
                "Transfer-Encoding is allowed in HTTP/1.1 only, and not with Content-Length"
            )
        if coding.lower() != "chunked":
            raise RequestRefused("the Transfer-Encoding must be chunked")
        return _CHUNKED, 0
    if length is None:
        return _NONE, 0
    if not _is_length(length):
        raise RequestRefused("the Content-Length must be one number")
    size = int(length)
    return (_LENGTH, size) if size else (_NONE, 0)


def _is_length(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_LENGTH_DIGITS


def _split_target(target: str, method: str) -> tuple[str, str]:
    if target[0] != "/":
        if target == "*" and method == "OPTIONS":
            return "*", ""
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise RequestRefused("the address in the request line is not valid")
        target = absolute[1] or "/"
        target = target if target[0] == "/" else f"/{target}"
    if "#" in target:
        raise RequestRefused("the address in the request line is not valid")
    path, _, query = target.partition("?")
    return path, query


def _keeps_alive(connection: str | None, is_http11: bool) -> bool:
    if connection is None:
        return is_http11
    words = [word.strip() for word in connection.lower().split(",")]
    return "close" not in words and (is_http11 or "keep-alive" in words)


def _expects_continue(expect: str) -> bool:
    if expect.lower() != "100-continue":
        raise RequestRefused("the only Expect header supported is 100-continue", status=417)
    return True
