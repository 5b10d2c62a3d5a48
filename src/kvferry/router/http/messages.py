"""How an instance can fail the router, by what the router may still do about it.

UpstreamError
  ConnectFailed     no connection: the request was not sent
  UpstreamTimeout       connected, but silent for too long
  UpstreamDisconnected      it closed in the middle; `has_answered` says whether any byte of the answer had come
  InvalidResponse        what it sent is not an HTTP answer
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType

__all__ = [
    "ConnectFailed",
    "Fields",
    "Headers",
    "InvalidResponse",
    "ServerLimits",
    "ServerRequest",
    "UpstreamDisconnected",
    "UpstreamError",
    "UpstreamTimeout",
    "request_fields",
    "request_head",
    "response_head",
]


class UpstreamError(Exception):
    """An instance did not answer as it should. The message is a sentence without the instance's
    name.
    """


class ConnectFailed(UpstreamError):
    """No connection could be made; nothing was sent."""


class UpstreamTimeout(UpstreamError):
    """It was silent for longer than it may be."""


class UpstreamDisconnected(UpstreamError):
    """It closed the connection before its answer was whole."""

    def __init__(
        self, message: str, has_answered: bool
    ) -> None:  # a fact about the failure, not a switch
        self.has_answered = has_answered
        super().__init__(message)


class InvalidResponse(UpstreamError):
    """What it sent cannot be read as an answer."""


# -------------------- limits --------------------
# What a client may ask of the server's memory and patience. Pure.


@dataclass(frozen=True, slots=True)
class ServerLimits:
    head_bytes: int = 32 * 1024
    """Of a request line with its header fields."""
    num_headers: int = 100
    body_bytes: int = 64 * 1024 * 1024
    num_connections: int = 10_000
    head_timeout_s: float = 10.0
    """From the first byte of a head to its last; also for a TLS handshake."""
    body_idle_timeout_s: float = 30.0
    """Between two segments of a body."""
    body_timeout_s: float = 300.0
    """For a whole body, so that one byte now and then does not hold a connection for ever."""
    keepalive_s: float = 75.0
    """How long a connection may wait for its next request, the first one included."""
    stall_timeout_s: float = 60.0
    """How long a client may read nothing while there is something for it."""
    linger_s: float = 2.0
    """How long what a refused client still sends is read and dropped: closing at once would destroy
    the answer on its way.
    """


# -------------------- messages --------------------
# What both sides of HTTP are made of: header fields, and a request as a handler gets it. Pure.


_NO_VALUES: Mapping[str, str] = MappingProxyType({})


class Headers:
    """Header fields of a request or an answer. Names are compared without case; fields of one name
    are joined by a comma.
    """

    __slots__ = ("_lines", "_pairs", "_values")

    def __init__(self, lines: Sequence[str] = (), values: Mapping[str, str] = _NO_VALUES) -> None:
        """The lines of a head, found to be valid, and what they say by name. Only who asks for
        `items` has the lines taken apart.
        """
        self._lines = lines
        self._values = values
        self._pairs: list[tuple[str, str]] | None = None

    def get(self, name: str) -> str | None:
        """`name` in lower case."""
        return self._values.get(name)

    def items(self) -> Iterable[tuple[str, str]]:
        """In the order and spelling in which they came."""
        if self._pairs is None:
            parts = [line.partition(":") for line in self._lines]
            self._pairs = [(name, value.strip(" \t")) for name, _, value in parts]
        return self._pairs

    def __len__(self) -> int:
        return len(self._lines)

    def __repr__(self) -> str:
        return f"Headers({self.items()!r})"


@dataclass(slots=True)
class ServerRequest:
    """`path` and `query` are as they were sent, escapes and all. While `admit` looks at it, `body`
    is empty.
    """

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes
    peer: str


# -------------------- wire -------------------- Heads of the messages we send. Fields that frame a
# message or concern one hop only are ours, never the caller's. Pure.


Fields = Iterable[tuple[str, str]] | bytes
"""Of a request: by name and value, or as `request_fields` has made them."""

_HOP_BY_HOP = frozenset(
    (
        "connection",
        "content-length",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ),
)
_NOT_FORWARDED = _HOP_BY_HOP | {"host", "expect"}
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}


def response_head(status: int, headers: Iterable[tuple[str, str]], framing: str) -> bytes:
    """`framing`: our own fields, each with its line end. ValueError when a field would break out of
    its line.
    """
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return _join(line, headers, f"{framing}\r\n", _HOP_BY_HOP, 2 + framing.count("\n")).encode(
        "latin-1"
    )


def request_fields(headers: Iterable[tuple[str, str]]) -> bytes:
    """Lines that may be sent more than once. ValueError when a field would break out of its
    line.
    """
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
    return _join(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n", (), "", _NOT_FORWARDED, 2).encode(
        "latin-1"
    )


def _join(
    start: str, headers: Iterable[tuple[str, str]], end: str, dropped: frozenset[str], num_own: int
) -> str:
    """`num_own`: lines of `start` and `end`."""
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in dropped]
    text = "".join((start, *lines, end))
    expected = len(lines) + num_own
    if text.count("\r") != expected or text.count("\n") != expected:
        raise ValueError("a header with a line end in it cannot be sent")
    return text
