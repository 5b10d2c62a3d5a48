"""Heads of the messages we send. Fields that frame a message or concern one hop only are ours, never the caller's. Pure."""

from collections.abc import Iterable
from http import HTTPStatus

__all__ = ["answer_head", "request_head"]

_HOP_BY_HOP = frozenset(
    ("connection", "content-length", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
)
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "expect"}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


def answer_head(status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
    """`framing`: our own fields, each with its line end. ValueError when a field would break out of its line."""
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return _encode(line, headers, framing, _HOP_BY_HOP, 1 + framing.count("\n"))


def request_head(method: str, path: str, host: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    """ValueError when the path or a field would break out of its line."""
    if " " in path or " " in method:
        raise ValueError("a method or path with a blank in it cannot be sent")
    framing = f"Content-Length: {length}\r\n" if length or method not in ("GET", "HEAD") else ""
    return _encode(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n", headers, framing, _NOT_FORWARDED, 3 if framing else 2)


def _encode(start: str, headers: Iterable[tuple[str, str]], framing: str, dropped: frozenset[str], num_own: int) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in dropped]
    text = "".join((start, *lines, framing, "\r\n"))
    expected = len(lines) + num_own + 1
    if text.count("\r") != expected or text.count("\n") != expected:
        raise ValueError("a header with a line end in it cannot be sent")
    return text.encode("latin-1")
