"""The bytes of one connection as requests, one after the other. Pure: no socket, no clock."""

import re

from kvferry.errors import RequestRefused
from kvferry.router.http1.framing import ChunkedBody, FramingError
from kvferry.router.http1.limits import ServerLimits
from kvferry.router.http1.parsing import BodyKind, RequestHead, check_partial_head, read_request_head

__all__ = ["RequestReader"]

_MAX_SEGMENTS = 1024
_EMPTY_LINES = re.compile(rb"\A(?:\r\n)+")


class RequestReader:
    """Give it bytes, then take a head, then that head's body, then the next head. RequestRefused ends it: what follows cannot be read."""

    __slots__ = ("_chunked", "_data", "_is_line_checked", "_left", "_limits", "_segments", "_size")

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._data = b""
        self._is_line_checked = False
        self._left = -1  # of a body of known length; -1 when none is being read
        self._chunked: ChunkedBody | None = None
        self._segments: list[bytes] = []
        self._size = 0  # of the segments

    @property
    def num_waiting(self) -> int:
        """Bytes that nobody has taken."""
        return len(self._data) + self._size

    def add(self, data: bytes) -> None:
        if self._left >= 0:
            self._keep(data)
        elif self._data:
            self._data += data
        else:
            self._data = data

    def take_head(self) -> RequestHead | None:
        """None while it is not whole."""
        data = self._data
        if data[:1] == b"\r":  # empty lines before a request are ignored (RFC 9112, 2.2)
            data = self._data = _EMPTY_LINES.sub(b"", data, count=1)
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._check_unfinished(data)
            return None
        if end > self._limits.head_bytes:
            raise _too_long(self._limits)
        head = read_request_head(data[: end + 4], self._limits.num_headers)
        self._is_line_checked = False
        self._begin_body(head, data[end + 4 :])
        return head

    def take_body(self) -> bytes | None:
        """Of the head taken last; None while it is not whole."""
        if self._left >= 0:
            return self._take_length()
        if self._chunked is not None:
            return self._take_chunked(self._chunked)
        return b""

    def _check_unfinished(self, data: bytes) -> None:
        if len(data) > self._limits.head_bytes:
            raise _too_long(self._limits)
        if data and not self._is_line_checked and data != b"\r":
            self._is_line_checked = check_partial_head(data)

    def _begin_body(self, head: RequestHead, rest: bytes) -> None:
        self._data = rest
        if head.body is BodyKind.LENGTH:
            if head.length > self._limits.body_bytes:
                raise _too_large(self._limits)
            self._left = head.length
            self._data = b""
            self._segments = [rest]
            self._size = len(rest)
        elif head.body is BodyKind.CHUNKED:
            self._chunked = ChunkedBody()

    def _take_length(self) -> bytes | None:
        length = self._left
        if self._size < length:
            return None
        joined = self._segments[0] if len(self._segments) == 1 else b"".join(self._segments)
        self._end_body()
        if len(joined) == length:
            return joined
        self._data = joined[length:]
        return joined[:length]

    def _take_chunked(self, chunked: ChunkedBody) -> bytes | None:
        decoded: list[bytes] = []
        try:
            used = chunked.advance(self._data, decoded)
        except FramingError as error:
            raise RequestRefused(f"the body of the request is not chunked as it says: {error}") from None
        self._data = self._data[used:]
        segment = b"".join(decoded)  # tiny chunks must not become many objects
        if segment:
            self._keep(segment)
        if self._size > self._limits.body_bytes:
            raise _too_large(self._limits)
        if not chunked.is_ended:
            return None
        body = b"".join(self._segments)
        self._end_body()
        return body

    def _keep(self, segment: bytes) -> None:
        self._segments.append(segment)
        self._size += len(segment)
        if len(self._segments) > _MAX_SEGMENTS:
            self._segments = [b"".join(self._segments)]

    def _end_body(self) -> None:
        self._left = -1
        self._chunked = None
        self._segments = []
        self._size = 0


def _too_long(limits: ServerLimits) -> RequestRefused:
    return RequestRefused(f"the request line and headers are longer than the {limits.head_bytes} bytes that this server reads", status=431)


def _too_large(limits: ServerLimits) -> RequestRefused:
    return RequestRefused(f"the request body is larger than the {limits.body_bytes} bytes that this server takes", status=413)
