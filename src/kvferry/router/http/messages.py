"""Types shared by the HTTP server and the HTTP client: errors, limits, headers and message heads.

Pure. Errors of an instance are sorted by what the router can still do:

    UpstreamError
      ConnectFailed          no connection; the request was not sent
      UpstreamTimeout        connected, but silent for too long
      UpstreamDisconnected   closed too early; `has_answered`: whether any byte arrived
      AnswerTooLong          the answer has more bytes than the router reads as a whole
      InstanceSilent         silent to health checks too; `is_suspect`: perhaps by this request
      InvalidResponse        the bytes received are not an HTTP response
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType


class UpstreamError(Exception):
    """An instance did not answer correctly. The message does not name the instance."""


class ConnectFailed(UpstreamError):
    """No connection could be made; the request was not sent."""


class UpstreamTimeout(UpstreamError):
    """The instance was silent for longer than allowed."""


class UpstreamDisconnected(UpstreamError):
    """The instance closed the connection before its answer was complete."""

    def __init__(
        self, message: str, has_answered: bool
    ) -> None:  # the flag is a fact about the failure, not a switch
        self.has_answered = has_answered
        super().__init__(message)


class AnswerTooLong(UpstreamError):
    """The answer has more bytes than the caller wants to read as a whole."""


class InstanceSilent(UpstreamError):
    """The instance answers neither requests nor health checks."""

    def __init__(self, message: str, is_suspect: bool) -> None:
        """`is_suspect`: the request may be what made the instance silent."""
        self.is_suspect = is_suspect
        super().__init__(message)


class InvalidResponse(UpstreamError):
    """The bytes from the instance cannot be parsed as a response."""

    def __init__(self, message: str, details: str = "") -> None:
        """`details`: what the instance wrote. For the client only: it may repeat a prompt."""
        self.details = details
        super().__init__(message)


# -- limits --


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits on the memory and time that a client can use."""

    head_bytes: int = 32 * 1024
    """Bytes of the request line and headers together."""
    num_headers: int = 100
    body_bytes: int = 64 * 1024 * 1024
    unfinished_bytes: int = 512 * 1024 * 1024
    """Bytes of the bodies of all requests together, from their arrival to the end of the request.
    The first 64 KiB of a body do not count (`kvferry.web.bodies`).
    """
    num_connections: int = 10_000
    head_timeout_s: float = 10.0
    """Time from the first byte of a head to its last, and time for a TLS handshake."""
    body_idle_timeout_s: float = 30.0
    """Longest pause within a body."""
    body_timeout_s: float = 300.0
    """Time for a whole body, so that a client cannot hold a connection with a byte now and then."""
    keepalive_s: float = 75.0
    """How long a connection may wait for its next request, the first one included."""
    stall_timeout_s: float = 60.0
    """How long a client may read nothing while data is waiting for it."""
    linger_s: float = 2.0
    """How long the remaining input of a refused client is read and dropped. Closing at once would
    reset the connection and destroy the response in flight.
    """


# -- headers and requests --


_NO_VALUES: Mapping[str, str] = MappingProxyType({})


class Headers:
    """Header fields of a request or response. Names are case-insensitive; values of equal names are
    joined by commas.
    """

    __slots__ = ("_pairs", "_values")

    def __init__(
        self, pairs: Sequence[tuple[str, str]] = (), values: Mapping[str, str] = _NO_VALUES
    ) -> None:
        """`pairs` are the fields as they arrived, `values` the same fields by lower-case name."""
        self._pairs = pairs
        self._values = values

    def get(self, name: str) -> str | None:
        """The value of a field; `name` in lower case."""
        return self._values.get(name)

    def items(self) -> Sequence[tuple[str, str]]:
        """Fields in the order and spelling in which they arrived."""
        return self._pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __repr__(self) -> str:
        return f"Headers({self.items()!r})"


@dataclass(slots=True)
class ServerRequest:
    """A request as a handler gets it. `path` and `query` are not unescaped. `body` is empty while
    `admit` checks the request.
    """

    method: str
    path: str
    query: str
    headers: Headers
    body: bytes | bytearray
    peer: str


# -- heads --
# Heads of the messages that we send. The framing and hop-by-hop fields are set here; the caller's
# fields of the same names are dropped.


Fields = Iterable[tuple[str, str]] | bytes
"""Header fields of a request: pairs of name and value, or the bytes from `request_fields`."""

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
    """Encode the head of a response. `framing`: our own fields, each with CR LF. ValueError if a
    field contains a line end.
    """
    line = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return _join(line, headers, f"{framing}\r\n", _HOP_BY_HOP, 2 + framing.count("\n")).encode(
        "latin-1"
    )


def request_fields(headers: Iterable[tuple[str, str]]) -> bytes:
    """Encode header fields for several requests. ValueError if a field contains a line end."""
    return _join("", headers, "", _NOT_FORWARDED, 0).encode("latin-1")


def request_head(method: str, path: str, host: str, headers: Fields, length: int) -> bytes:
    """Encode the head of a request. ValueError if the path or a field contains a line end."""
    fields = headers if isinstance(headers, bytes) else request_fields(headers)
    start = _request_start(method, path, host)
    if length or method not in ("GET", "HEAD"):
        return b"%b%bContent-Length: %d\r\n\r\n" % (start, fields, length)
    return b"%b%b\r\n" % (start, fields)


@lru_cache(256)
def _request_start(method: str, path: str, host: str) -> bytes:
    if " " in path or " " in method:
        raise ValueError("a method or path that contains a space cannot be sent")
    return _join(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n", (), "", _NOT_FORWARDED, 2).encode(
        "latin-1"
    )


def _join(
    start: str, headers: Iterable[tuple[str, str]], end: str, dropped: frozenset[str], num_own: int
) -> str:
    """Join the lines of a head; `num_own` is the number of lines in `start` and `end`."""
    lines = [f"{name}: {value}\r\n" for name, value in headers if name.lower() not in dropped]
    text = "".join((start, *lines, end))
    # More line ends than lines: a header value would inject a line.
    expected = len(lines) + num_own
    if text.count("\r") != expected or text.count("\n") != expected:
        raise ValueError("a header that contains a line end cannot be sent")
    return text
