"""Message framing: where a body ends, and how the bytes of a connection become requests.

Pure: no socket, no clock. Input may be cut anywhere. A body ends by length, by chunks, or with the
connection. A body object either decodes its input, or only tracks the end while raw bytes are
passed on.
"""

import re
from collections.abc import Callable
from enum import IntEnum

from kvferry.errors import RequestRefused
from kvferry.router.http.messages import ServerLimits
from kvferry.router.http.parsing import (
    BodyKind,
    RequestHead,
    check_partial_head,
    read_request_head,
)

_MAX_LINE = 4096
_MAX_TRAILERS = 16 * 1024
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~\x80-\xff]*")
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t -~\x80-\xff]*)?")


_KNOWN_SIZES = {b"\r\n%x\r\n" % size: size for size in range(1, 4097)}
"""Chunk size lines as engines write them, between two line ends, with their values. A lookup is
cheaper than parsing. Larger chunks are parsed, which is little work per byte. The table never
changes, so no client can fill it with sizes of its own.
"""
_MAX_KNOWN_LINE = max(map(len, _KNOWN_SIZES)) - 2


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


# State within a chunked body. Plain integers: in Python 3.11 reading an enum member costs as much
# as a dictionary lookup.
_SIZE, _DATA, _DATA_END, _TRAILERS, _END = range(5)


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
    """A chunked body. Strict: sizes are hexadecimal digits, lines end in CR LF, extensions and
    trailers are printable and bounded.
    """

    __slots__ = ("_left", "_line", "_num_trailer_bytes", "_part", "is_ended")
    is_complete_at_close = False

    def __init__(self) -> None:
        self._part = _SIZE
        self._left = 0  # bytes left in the current chunk
        self._line = b""  # start of a line whose end has not arrived
        self._num_trailer_bytes = 0
        self.is_ended = False

    @property
    def is_at_boundary(self) -> bool:
        """Whether a new chunk could begin exactly here."""
        return self._part == _SIZE and not self._line

    def advance(self, data: bytes, decoded: list[bytes] | None) -> int:
        """Consume body bytes and return their number; append data to `decoded`, if given.

        Raises FramingError.
        """
        position, end = 0, len(data)
        if self._part == _SIZE and not self._line:
            position = self._skip_known_chunks(data, decoded)
        while position < end:
            part = self._part
            if part == _SIZE:
                position = self._take_size(data, position)
            elif part == _DATA:
                position = self._take_data(data, position, end, decoded)
            elif part == _END:
                break
            else:
                position = self._take_line_end(data, position)
        return position

    def _skip_known_chunks(self, data: bytes, decoded: list[bytes] | None) -> int:
        """Skip complete chunks of known sizes; return the position of the first other byte.

        Nearly all input consists of complete chunks of known sizes.
        """
        position, end, known = 0, len(data), _KNOWN_SIZES.get
        while position < end:
            start = data.find(b"\n", position, position + _MAX_KNOWN_LINE) + 1
            size = known(b"\r\n" + data[position:start]) if start else None
            if size is None:
                return self._take_end(data, position)
            # Consecutive size lines mostly have the same width: one lookup then checks the end of a
            # chunk and reads the size of the next.
            width = start - position
            between = width + 2
            stop = start + size
            while (size := known(data[stop : stop + between])) is not None:
                if decoded is not None:
                    decoded.append(data[start:stop])
                start = stop + between
                stop = start + size
            if data[stop : stop + 2] != b"\r\n":
                return start - width
            if decoded is not None:
                decoded.append(data[start:stop])
            position = stop + 2
        return position

    def _take_end(self, data: bytes, position: int) -> int:
        if data[position : position + 5] != b"0\r\n\r\n":
            return position
        self._part = _END
        self.is_ended = True
        return position + 5

    def resume_raw(self, start: bytes) -> bytes | None:
        """Frame `start`, which is already decoded, so that the remaining raw bytes can follow
        unchanged. None if the current position does not permit raw bytes.
        """
        if self._part == _DATA:
            # Inside a chunk: one new chunk covers `start` and the rest of the current chunk.
            return b"%x\r\n%b" % (len(start) + self._left, start)
        if self.is_at_boundary:
            return chunk(start) if start else b""
        return None

    def _take_size(self, data: bytes, position: int) -> int:
        line, position = self._take_line(data, position)
        if line is None:
            return position
        spelt = _SIZE_LINE.fullmatch(line)  # int() would also accept 0x10, 1_0, +1 and spaces
        if spelt is None:
            raise FramingError("the size of a chunk is not valid")
        self._left = int(spelt[1], 16)
        self._part = _DATA if self._left else _TRAILERS
        return position

    def _take_data(self, data: bytes, position: int, end: int, decoded: list[bytes] | None) -> int:
        stop = position + self._left
        if stop > end:
            self._left = stop - end
            stop = end
        else:
            self._left = 0
            self._part = _DATA_END
        if decoded is not None:
            decoded.append(data[position:stop])
        if self._part == _DATA_END and data[stop : stop + 2] == b"\r\n":
            self._part = _SIZE
            return stop + 2
        return stop

    def _take_line_end(self, data: bytes, position: int) -> int:
        """Consume the CR LF after a chunk's data, or one trailer line."""
        line, position = self._take_line(data, position)
        if self._part == _DATA_END:
            if line == b"":
                self._part = _SIZE
            elif line is not None or self._line != b"\r":
                raise FramingError("a chunk is longer than its size")
            return position
        self._num_trailer_bytes += len(line or b"")
        if self._num_trailer_bytes > _MAX_TRAILERS:
            raise FramingError("the trailers are too long")
        if line == b"":
            self._part = _END
            self.is_ended = True
        elif line is not None and _TRAILER.fullmatch(line) is None:
            raise FramingError("a trailer is not valid")
        return position

    def _take_line(self, data: bytes, position: int) -> tuple[bytes | None, int]:
        """The current line without CR LF, or None while the line is incomplete."""
        found = data.find(b"\n", position)
        stop = found + 1 if found >= 0 else len(data)
        line = self._line + data[position:stop]
        if len(line) > _MAX_LINE:
            raise FramingError("a line between chunks is too long")
        if found < 0:
            self._line = line
            return None, stop
        self._line = b""
        if line[-2:] != b"\r\n":
            raise FramingError("a line between chunks does not end in CR LF")
        return line[:-2], stop


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


def first_chunk(data: bytes) -> bytes | None:
    """Data of the first chunk in `data`, if its size line is known and the chunk is complete."""
    start = data.find(b"\n") + 1
    size = _KNOWN_SIZES.get(b"\r\n" + data[:start])
    return data[start : start + size] if size is not None and len(data) >= start + size else None


def chunk(data: bytes) -> bytes:
    """Encode one chunk. `data` must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


# -- requests --
# The bytes of one connection as consecutive requests.


_EMPTY_LINES = re.compile(rb"\A(?:\r\n)+")


class RequestReader:
    """Parses one connection: add bytes, take a head, take the body of that head, and repeat. After
    RequestRefused the rest of the connection cannot be parsed.
    """

    __slots__ = ("_body", "_chunked", "_data", "_is_line_checked", "_left", "_limits")

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._data = b""
        self._is_line_checked = False
        self._left = -1  # length of the current body; -1 if no body of known length is read
        self._chunked: ChunkedBody | None = None
        # Grows with each segment: joining the segments of a large body at its end would block the
        # event loop for all other clients.
        self._body = bytearray()

    @property
    def num_waiting(self) -> int:
        """Number of bytes added and not yet taken."""
        return len(self._data) + len(self._body)

    def add(self, data: bytes) -> None:
        if self._left >= 0:
            self._body += data
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

    def take_body(self) -> bytes | bytearray | None:
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
            self._body = bytearray(rest)
        elif head.body is BodyKind.CHUNKED:
            self._chunked = ChunkedBody()

    def _take_length(self) -> bytearray | None:
        length = self._left
        if len(self._body) < length:
            return None
        self._data = bytes(memoryview(self._body)[length:])
        del self._body[length:]
        return self._end_body()

    def _take_chunked(self, chunked: ChunkedBody) -> bytearray | None:
        decoded: list[bytes] = []
        try:
            used = chunked.advance(self._data, decoded)
        except FramingError as error:
            raise RequestRefused(f"the chunked body of the request is not valid: {error}") from None
        self._data = self._data[used:]
        self._body += b"".join(decoded)
        if len(self._body) > self._limits.body_bytes:
            raise _too_large(self._limits)
        if not chunked.is_ended:
            return None
        return self._end_body()

    def _end_body(self) -> bytearray:
        body, self._body = self._body, bytearray()
        self._left = -1
        self._chunked = None
        return body


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
