"""Message framing: where a body ends, and how the bytes of a connection become requests.

Pure: no socket, no clock. Input may be cut anywhere. A body ends by length, by chunks, or with the
connection. A body object either decodes its input, or only tracks the end while raw bytes are
passed on.
"""

import re
from collections.abc import Callable
from enum import IntEnum

from httptools import HttpParserError, HttpRequestParser

from kvferry.errors import RequestRefused
from kvferry.router.http.messages import ServerLimits
from kvferry.router.http.parsing import (
    BodyKind,
    RequestHead,
    check_partial_head,
    read_request_head,
)

__all__ = [
    "Body",
    "ChunkedBody",
    "Framing",
    "FramingError",
    "LengthBody",
    "RequestReader",
    "UntilCloseBody",
    "chunk",
    "make_body",
]


_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_LF = 0x0A
_MAX_LINE_BYTES = 4096
"""Longest size line of a chunk, and longest trailers."""


class FramingError(Exception):
    """The bytes are not valid in this framing."""


class Framing(IntEnum):
    """How the end of our own response is marked."""

    WHOLE = 0
    """By its length; the body is complete at the start."""
    LENGTH = 1
    """By its length; the body follows later."""
    CHUNKED = 2
    """By chunks."""
    UNTIL_CLOSE = 3
    """By the end of the connection."""


class LengthBody:
    """A body of known length."""

    __slots__ = ("is_ended", "left")
    is_complete_at_close = False
    is_at_boundary = False

    def __init__(self, length: int) -> None:
        self.left = length
        self.is_ended = length == 0

    def advance(self, data: bytes, decoded: list[bytes] | None) -> int:
        """Consume body bytes and return their number; append data to `decoded`, if given."""
        left = self.left
        if len(data) < left:
            self.left = left - len(data)
            if decoded is not None:
                decoded.append(data)
            return len(data)
        self.left = 0
        self.is_ended = True
        if decoded is not None:
            decoded.append(data if len(data) == left else data[:left])
        return left


class UntilCloseBody:
    """A body that ends with its connection."""

    __slots__ = ()
    is_complete_at_close = True
    is_at_boundary = True
    is_ended = False

    def advance(self, data: bytes, decoded: list[bytes] | None) -> int:
        if decoded is not None:
            decoded.append(data)
        return len(data)


class ChunkedBody:
    """A chunked body. httptools parses it, strictly; this class finds out where the body ends, and
    limits the bytes that are not data.
    """

    __slots__ = (
        "_decoded",
        "_is_in_chunk",
        "_num_idle_bytes",
        "_num_trailer_bytes",
        "_parser",
        "_tail",
        "is_at_boundary",
        "is_ended",
    )
    is_complete_at_close = False

    def __init__(self) -> None:
        self._decoded: list[bytes] | None = None
        self._is_in_chunk = False
        self._tail = b""  # the last three bytes that were parsed
        self.is_at_boundary = True
        """Whether a new chunk could begin exactly here."""
        self.is_ended = False
        self._num_idle_bytes = 0  # bytes since the last one that began, filled or ended a chunk
        self._num_trailer_bytes = 0
        # A parser for one body. It needs a head first; the real one was parsed before.
        self._parser: HttpRequestParser | None = HttpRequestParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)

    def advance(self, data: bytes, decoded: list[bytes] | None) -> int:
        """Consume body bytes and return their number; append data to `decoded`, if given.

        Raises FramingError.
        """
        if self.is_ended or not data:
            return 0
        self._decoded = decoded
        # httptools does not report at which byte a message ends. It can end only after an empty
        # line, which hardly ever occurs elsewhere: feed the bytes up to each empty line, and look.
        raw = self._tail + data
        if b"\r\n\r\n" not in raw:
            self._feed(data)
            self._tail = raw[-3:]
            return len(data)
        start = num_before = len(self._tail)
        while start < len(raw) and not self.is_ended:
            found = raw.find(b"\r\n\r\n", max(start - 3, 0))
            stop = found + 4 if found >= 0 else len(raw)
            self._feed(raw[start:stop])
            start = stop
        self._tail = raw[-3:]
        return start - num_before

    def resume_raw(self, start: bytes) -> bytes | None:
        """Frame `start`, which is already decoded, so that the remaining raw bytes can follow
        unchanged. None if the current position does not permit raw bytes.
        """
        if not self.is_at_boundary:
            return None
        return chunk(start) if start else b""

    def _feed(self, data: bytes) -> None:
        assert self._parser is not None
        self._num_idle_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            raise FramingError(str(error)) from None
        if self._num_idle_bytes > _MAX_LINE_BYTES or self._num_trailer_bytes > _MAX_LINE_BYTES:
            raise FramingError(f"more than {_MAX_LINE_BYTES} bytes of a size line or of trailers")
        if self.is_ended:
            self._parser = None  # it refers to us: free both without the garbage collector
            self.is_at_boundary = False
        else:
            # Outside of chunks, a line end that did not begin a chunk has ended one.
            self.is_at_boundary = not self._is_in_chunk and data[-1] == _LF

    # -- called by httptools --

    def on_chunk_header(self) -> None:
        self._is_in_chunk = True
        self._num_idle_bytes = 0

    def on_body(self, data: bytes) -> None:
        self._num_idle_bytes = 0
        if self._decoded is not None:
            self._decoded.append(data)

    def on_chunk_complete(self) -> None:
        self._is_in_chunk = False
        self._num_idle_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:  # a trailer
        self._num_trailer_bytes += len(name) + len(value)

    def on_message_complete(self) -> None:
        self.is_ended = True


Body = LengthBody | ChunkedBody | UntilCloseBody


_MAKERS: tuple[Callable[[int], Body], ...] = (  # indexed by BodyKind
    lambda length: LengthBody(0),
    lambda length: LengthBody(length),
    lambda length: ChunkedBody(),
    lambda length: UntilCloseBody(),
)


def make_body(kind: BodyKind, length: int) -> Body:
    """Make the body object for a framing."""
    return _MAKERS[kind](length)


def chunk(data: bytes) -> bytes:
    """Encode one chunk. `data` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


# -- requests --
# The bytes of one connection as consecutive requests.


_MAX_SEGMENTS = 1024
"""Above this number the segments of a body are joined, so that tiny segments stay cheap."""
_EMPTY_LINES = re.compile(rb"\A(?:\r\n)+")


class RequestReader:
    """Parses one connection: add bytes, take a head, take the body of that head, and repeat. After
    RequestRefused the rest of the connection cannot be parsed.
    """

    __slots__ = ("_chunked", "_data", "_is_line_checked", "_left", "_limits", "_segments", "_size")

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._data = b""
        self._is_line_checked = False
        self._left = -1  # length of the current body; -1 if no body of known length is read
        self._chunked: ChunkedBody | None = None
        self._segments: list[bytes] = []
        self._size = 0  # total bytes of the segments

    @property
    def num_waiting(self) -> int:
        """Number of bytes added and not yet taken."""
        return len(self._data) + self._size

    def add(self, data: bytes) -> None:
        if self._left >= 0:
            self._keep(data)
        elif self._data:
            self._data += data
        else:
            self._data = data

    def take_head(self) -> RequestHead | None:
        """The next head; None while it is incomplete."""
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
        """The body of the last head; None while it is incomplete."""
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
            raise RequestRefused(f"the chunked body of the request is not valid: {error}") from None
        self._data = self._data[used:]
        segment = b"".join(decoded)  # join, so that tiny chunks do not become many objects
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
    return RequestRefused(
        f"the request line and headers are longer than the limit of {limits.head_bytes} bytes",
        status=431,
    )


def _too_large(limits: ServerLimits) -> RequestRefused:
    return RequestRefused(
        f"the request body is larger than the limit of {limits.body_bytes} bytes",
        status=413,
    )
