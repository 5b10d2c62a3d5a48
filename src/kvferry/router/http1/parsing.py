"""Heads of HTTP/1.1 messages, read strictly: what is not exactly right is refused, so that nobody behind us can read it another way.

One `findall` takes a head apart. That it skipped nothing is certain when there are as many CR and as many LF as fields: every match starts
right after an LF and ends in CR LF, so there is no room for anything between two of them. Pure.
"""

import re
from dataclasses import dataclass
from enum import IntEnum

from kvferry.errors import RequestRefused
from kvferry.router.http1.errors import NotHttp
from kvferry.router.http1.messages import Headers

__all__ = ["AnswerHead", "BodyKind", "RequestHead", "check_beginning", "is_field_line", "read_answer_head", "read_request_head"]

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_FIELD = re.compile(rf"(?<=\n)({_TOKEN}):([\t -~\x80-\xff]*)\r\n")
_FIELD_LINE = re.compile(rf"{_TOKEN}:[\t -~\x80-\xff]*".encode("latin-1"))
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/1\.([01])\r\n")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t -~\x80-\xff]*)?\r\n")
_BEGINNING = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}(?: (?:[!-~]+(?: [HTP/1.0]{0,8}\r?)?)?)?")
_ABSOLUTE = re.compile(r"[Hh][Tt][Tt][Pp][Ss]?://[^/?#]+([/?].*)?")
_MAX_LENGTH_DIGITS = 15


class BodyKind(IntEnum):
    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    UNTIL_CLOSE = 3


@dataclass(slots=True)
class RequestHead:
    method: str
    path: str
    query: str
    headers: Headers
    body: BodyKind
    length: int
    """Of the body, when it is told."""
    is_http11: bool
    keeps_alive: bool
    expects_continue: bool

    @property
    def has_body(self) -> bool:
        return self.body is not BodyKind.NONE


@dataclass(slots=True)
class AnswerHead:
    status: int
    headers: Headers
    body: BodyKind
    length: int
    keeps_alive: bool


def read_request_head(data: bytes, max_fields: int) -> RequestHead:
    """`data` ends with the empty line. RequestRefused for anything that is not exactly a head."""
    text = data.decode("latin-1")
    line = _REQUEST_LINE.match(text)
    if line is None:
        raise RequestRefused("the request line is not valid HTTP")
    headers = _read_fields(text, line.end() - 1)
    if headers is None:
        raise RequestRefused("a header of the request is not valid HTTP")
    if len(headers) > max_fields:
        raise RequestRefused(f"the request has more than {max_fields} headers", status=431)
    method, target, minor = line.groups()
    get = headers.get
    is_http11 = minor == "1"
    host = get("host")
    if (host is None and is_http11) or (host is not None and "," in host):
        raise RequestRefused("the request must have one Host header")
    kind, length = _request_body(get("transfer-encoding"), get("content-length"), is_http11)
    path, query = _split_target(target, method)
    expect = get("expect")
    if expect is not None and expect.lower() != "100-continue":
        raise RequestRefused("the Expect header is not understood; only 100-continue is", status=417)
    keeps_alive = _keeps_alive(get("connection"), is_http11)
    return RequestHead(method, path, query, headers, kind, length, is_http11, keeps_alive, expect is not None and is_http11)


def read_answer_head(data: bytes, method: str) -> AnswerHead:
    """`data` ends with the empty line; `method` is the request's. NotHttp for anything that is not exactly a head."""
    text = data.decode("latin-1")
    line = _STATUS_LINE.match(text)
    if line is None:
        raise NotHttp("its status line is not valid HTTP")
    headers = _read_fields(text, line.end() - 1)
    if headers is None:
        raise NotHttp("a header of its answer is not valid HTTP")
    minor, digits = line.groups()
    status = int(digits)
    get = headers.get
    keeps_alive = _keeps_alive(get("connection"), minor == "1")
    coding, length = get("transfer-encoding"), get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked" or minor == "0"):
        raise NotHttp("the length of its answer is told in two ways, or in one that is not known")
    if length is not None and not _is_length(length):
        raise NotHttp("the length of its answer is no number")
    size = int(length) if length is not None else 0
    if method == "HEAD" or status < 200 or status in (204, 304):
        return AnswerHead(status, headers, BodyKind.NONE, size, keeps_alive)
    if coding is not None:
        return AnswerHead(status, headers, BodyKind.CHUNKED, 0, keeps_alive)
    if length is not None:
        return AnswerHead(status, headers, BodyKind.LENGTH, size, keeps_alive)
    return AnswerHead(status, headers, BodyKind.UNTIL_CLOSE, 0, False)


def check_beginning(data: bytes) -> bool:
    """Look at a head that is not whole. RequestRefused as soon as it cannot become one (a TLS handshake, another protocol); whether its
    first line is whole, and so was looked at for the last time."""
    end = data.find(b"\n")
    if end < 0:
        if _BEGINNING.fullmatch(data) is None:
            raise RequestRefused("the request line is not valid HTTP")
        return False
    if _REQUEST_LINE.fullmatch(data[: end + 1].decode("latin-1")) is None:
        raise RequestRefused("the request line is not valid HTTP")
    return True


def is_field_line(line: bytes) -> bool:
    """Whether a line, without its end, could stand in a head; trailers must."""
    return _FIELD_LINE.fullmatch(line) is not None


def _read_fields(text: str, start: int) -> Headers | None:
    """The fields of a head; `start` is where the LF of its first line is. None when anything else is among them."""
    found = _FIELD.findall(text, start)
    num_lines = len(found) + 2  # the first line, and the empty one
    if text.count("\n") != num_lines or text.count("\r") != num_lines:
        return None
    return Headers([(name, value.strip(" \t")) for name, value in found])


def _request_body(coding: str | None, length: str | None, is_http11: bool) -> tuple[BodyKind, int]:
    if coding is not None:
        if length is not None or not is_http11:
            raise RequestRefused("the length of the body is told in two ways")
        if coding.lower() != "chunked":
            raise RequestRefused("the Transfer-Encoding is not understood; only chunked is")
        return BodyKind.CHUNKED, 0
    if length is None:
        return BodyKind.NONE, 0
    if not _is_length(length):
        raise RequestRefused("the Content-Length is no number, or is there twice")
    size = int(length)
    return (BodyKind.LENGTH, size) if size else (BodyKind.NONE, 0)


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
