"""Heads of the messages we send. Fields that frame a message or concern one hop only are ours, never the caller's. Pure."""

from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus

__all__ = ["Fields", "request_fields", "request_head", "response_head"]

Fields = Iterable[tuple[str, str]] | bytes
"""Of a request: by name and value, or as `request_fields` has made them."""

_HOP_BY_HOP = frozenset(
    ("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
)
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "expect"}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


def response_head(status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
    """`framing`: our own fields, each with its line end. ValueError when a field would break out of its line."""
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return _join(line, headers, f"{framing}\r\n", _HOP_BY_HOP, 2 + framing.count("\n")).encode("latin-1")


def request_fields(headers: Iterable[tuple[str, str]]) -> bytes:
    """Lines that may be sent more than once. ValueError when a field would break out of its line."""
    return _join("", headers, "", _NOT_FORWARDED, 0).encode("latin-1")


def request_head(method: str, path: str, host: str, headers: Fields, length: int) -> bytes:
    """ValueError when the path or a field would break out of its line."""
    fields = headers if isinstance(headers, bytes) else request_fields(headers)
    start = _request_start(method, path, host)
    if length or method not in ("GET", "HEAD"):
        return b"%b%bContent-Length: %d\r\n\r\n" % (start, fields, length)
    return b"%b%b\r\n" % (start, fields)


@lru_cache(256)
def _request_start(method: str, path: str, host: str) -> bytes:
    if " " in path or " " in method:
        raise ValueError("a method or path with a blank in it cannot be sent")
    return _join(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n", (), "", _NOT_FORWARDED, 2).encode("latin-1")


def _join(start: str, headers: Iterable[tuple[str, str]], end: str, dropped: frozenset[str], num_own: int) -> str:
    """`num_own`: lines of `start` and `end`."""
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in dropped]
    text = "".join((start, *lines, end))
    expected = len(lines) + num_own
    if text.count("\r") != expected or text.count("\n") != expected:
        raise ValueError("a header with a line end in it cannot be sent")
    return text
