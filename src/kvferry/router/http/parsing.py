"""Parses the heads of HTTP/1.1 messages, strictly.

Input that is not exactly valid is refused, so that no server behind the router can interpret it
differently. Written by hand instead of using httptools: as fast, and stricter, see
docs/decisions/031-router-http.md. Pure.
"""

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from kvferry.errors import RequestRefused
from kvferry.router.http.messages import Headers, InvalidResponse

__all__ = [
    "BodyKind",
    "RequestHead",
    "ResponseHead",
    "check_partial_head",
    "is_field_line",
    "read_request_head",
    "read_response_head",
]

_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t -~\x80-\xff]*)?")
# Matches any prefix of a valid request line.
_BEGINNING = re.compile(
    rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}(?: (?:[!-~]+(?: [HTP/1.0]{0,8}\r?)?)?)?"
)
_ABSOLUTE = re.compile(r"[Hh][Tt][Tt][Pp][Ss]?://[^/?#]+([/?].*)?")
_MAX_LENGTH_DIGITS = 15
_MAX_KNOWN = 256
"""Longest line that is cached; bounds the caches in bytes."""
_MAX_KNOWN_HEAD = 512
"""Longest response head that is cached."""


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
    lines = data.decode("latin-1").split("\r\n")
    first = lines[0]
    line = _known_request_line(first) if len(first) < _MAX_KNOWN else _read_request_line(first)
    if line is None:
        raise RequestRefused("the request line is not valid HTTP")
    fields = lines[1:-2]
    if len(fields) > max_fields:
        raise RequestRefused(f"the request has more than {max_fields} headers", status=431)
    values = _read_fields(fields)
    if values is None:
        raise RequestRefused("a header of the request is not valid HTTP")
    method, path, query, is_http11 = line
    host = values.get("host")
    if (host is None and is_http11) or (host is not None and "," in host):
        raise RequestRefused("the request must have one Host header")
    kind, length = _request_body(
        values.get("transfer-encoding"), values.get("content-length"), is_http11
    )
    expects_continue = "expect" in values and _expects_continue(values["expect"])
    keeps_alive = (
        _keeps_alive(values["connection"], is_http11) if "connection" in values else is_http11
    )
    return RequestHead(
        method,
        path,
        query,
        Headers(fields, values),
        kind,
        length,
        is_http11,
        keeps_alive,
        expects_continue,
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
    lines = data.decode("latin-1").split("\r\n")
    line = _STATUS_LINE.fullmatch(lines[0])
    if line is None:
        raise InvalidResponse("its status line is not valid HTTP")
    fields = lines[1:-2]
    values = _read_fields(fields)
    if values is None:
        raise InvalidResponse("a header of its answer is not valid HTTP")
    minor, digits = line.groups()
    status = int(digits)
    if status == 101:
        raise InvalidResponse("it wants to speak another protocol, which nobody asked for")
    keeps_alive = (
        _keeps_alive(values["connection"], minor == "1") if "connection" in values else minor == "1"
    )
    coding, length = values.get("transfer-encoding"), values.get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked" or minor == "0"):
        raise InvalidResponse(
            "the length of its answer is told in two ways, or in one that is not known"
        )
    if length is not None and not _is_length(length):
        raise InvalidResponse("the length of its answer is no number")
    size = int(length) if length is not None else 0
    headers = Headers(fields, values)
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
    end = data.find(b"\n")
    if end < 0:
        if _BEGINNING.fullmatch(data) is None:
            raise RequestRefused("the request line is not valid HTTP")
        return False
    if (
        data[end - 1 : end] != b"\r"
        or _REQUEST_LINE.fullmatch(data[: end - 1].decode("latin-1")) is None
    ):
        raise RequestRefused("the request line is not valid HTTP")
    return True


def is_field_line(line: bytes) -> bool:
    """Whether a line without its end is a valid header field; trailers must be valid too."""
    return _FIELD.fullmatch(line.decode("latin-1")) is not None


def _read_fields(lines: list[str]) -> dict[str, str] | None:
    """Fields by lower-case name; None if a line is not a valid field."""
    values: dict[str, str] = {}
    for line in lines:
        field = _known_field(line) if len(line) < _MAX_KNOWN else _read_field(line)
        if field is None:
            return None
        key, value = field
        values[key] = f"{values[key]}, {value}" if key in values else value
    return values


def _read_field(line: str) -> tuple[str, str] | None:
    found = _FIELD.fullmatch(line)
    return (found[1].lower(), found[2].strip(" \t")) if found is not None else None


def _read_request_line(line: str) -> tuple[str, str, str, bool] | None:
    """Method, path, query and whether it is HTTP/1.1; None if the line is malformed.

    Raises RequestRefused if the target is not valid.
    """
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        return None
    method, target, minor = found.groups()
    return method, *_split_target(target, method), minor == "1"


# Caches: nearly every line was seen before. Only one or two lines differ between the requests of
# one client or engine.
_known_field = lru_cache(4096)(_read_field)
_known_request_line = lru_cache(256)(_read_request_line)
# An engine starts all streams of one second with the same head; heads of complete answers differ
# in their length.
_known_response_head = lru_cache(512)(_read_response_head)


def _request_body(coding: str | None, length: str | None, is_http11: bool) -> tuple[BodyKind, int]:
    if coding is not None:
        if length is not None or not is_http11:
            raise RequestRefused("the length of the body is told in two ways")
        if coding.lower() != "chunked":
            raise RequestRefused("the Transfer-Encoding is not understood; only chunked is")
        return _CHUNKED, 0
    if length is None:
        return _NONE, 0
    if not _is_length(length):
        raise RequestRefused("the Content-Length is no number, or is there twice")
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


def _keeps_alive(connection: str, is_http11: bool) -> bool:
    words = [word.strip() for word in connection.lower().split(",")]
    return "close" not in words and (is_http11 or "keep-alive" in words)


def _expects_continue(expect: str) -> bool:
    if expect.lower() != "100-continue":
        raise RequestRefused(
            "the Expect header is not understood; only 100-continue is", status=417
        )
    return True
