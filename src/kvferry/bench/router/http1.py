"""A minimal HTTP/1.1 for a load client and stub engines at many thousands of messages per second.
Pure.

Both readers accept bytes in any chunks. In the common case, a message in one chunk, a reader only
searches for a few byte strings.
"""

_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
# Body lengths that are not a number of bytes.
_UNTIL_CLOSED = -1
_CHUNKED = -2


class MalformedHttp(Exception):
    """The peer sent bytes that are not HTTP of the kind that the benchmark expects."""


class HttpRequest:
    """One complete request."""

    __slots__ = ("body", "line")

    def __init__(self, line: bytes, body: bytes) -> None:
        self.line = line
        self.body = body


class ParsedResponse:
    """One complete response."""

    __slots__ = ("body", "keeps_alive", "status")

    def __init__(self, status: int, body: bytes, keeps_alive: bool) -> None:
        self.status = status
        self.body = body
        self.keeps_alive = keeps_alive


class StubRequestReader:
    """Reads the requests of one connection.

    `wants_continue` is set while a sender waits for `100 Continue`; the caller that sends `100
    Continue` resets the flag.
    """

    __slots__ = ("_body_at", "_data", "_length", "_line", "wants_continue")

    def __init__(self) -> None:
        self._data = b""
        self._length = 0
        self._line = b""
        self._body_at = 0
        self.wants_continue = False

    def feed(self, data: bytes) -> list[HttpRequest]:
        """Take bytes; return the requests that are complete now."""
        self._data = self._data + data if self._data else data
        found: list[HttpRequest] = []
        while self._data and (self._body_at or self._read_head()):
            body = self._take_body()
            if body is None:
                break
            self._body_at = 0
            self.wants_continue = False
            found.append(HttpRequest(self._line, body))
        return found

    def _read_head(self) -> bool:
        end = self._data.find(_HEAD_END)
        if end < 0:
            return False
        self._body_at = end + 4
        line, _, fields = self._data[:end].partition(b"\r\n")
        head = b"\r\n" + fields.lower() + b"\r\n"
        self._line = line
        self._length = (
            _CHUNKED if b"\r\ntransfer-encoding:" in head else max(0, _content_length(head))
        )
        self.wants_continue = b"\r\nexpect: 100-continue" in head
        return True

    def _take_body(self) -> bytes | None:
        data, start = self._data, self._body_at
        if self._length == _CHUNKED:
            return self._take_chunks()
        end = start + self._length
        if len(data) < end:
            return None
        self._data = data[end:] if len(data) > end else b""
        return data[start:end]

    def _take_chunks(self) -> bytes | None:
        taken = _unchunk(self._data, self._body_at)
        if taken is None:
            return None
        body, end = taken
        self._data = self._data[end:]
        return body


class ResponseReader:
    """Reads the response to the one request in progress on a connection."""

    __slots__ = ("_body_at", "_data", "_keeps_alive", "_length", "_status")

    def __init__(self) -> None:
        self._data = b""
        self._body_at = 0
        self._status = 0
        self._length = 0
        self._keeps_alive = True

    @property
    def has_body(self) -> bool:
        """Whether any byte after the head has arrived."""
        return 0 < self._body_at < len(self._data)

    def feed(self, data: bytes) -> ParsedResponse | None:
        """Return the response once the response is complete; the reader is then ready for the next
        one.
        """
        self._data = self._data + data if self._data else data
        if not self._body_at and not self._read_head():
            return None
        if self._length == _CHUNKED:
            # Check only the last bytes until they look like the end of the body. Text that merely
            # looks like the end is recognised because `_unchunk` reads all chunks.
            taken = (
                _unchunk(self._data, self._body_at) if self._data.endswith(_LAST_CHUNK) else None
            )
            if taken is None:
                return None
            body, end = taken
        elif self._length == _UNTIL_CLOSED:
            return None
        else:
            end = self._body_at + self._length
            if len(self._data) < end:
                return None
            body = self._data[self._body_at : end]
        if end != len(self._data):
            raise MalformedHttp("more than the answer came")
        return self._finish(body)

    def end(self) -> ParsedResponse | None:
        """Take the end of the connection: a response without a length ends with the connection."""
        if self._body_at and self._length == _UNTIL_CLOSED:
            self._keeps_alive = False
            return self._finish(self._data[self._body_at :])
        return None

    def _finish(self, body: bytes) -> ParsedResponse:
        self._data, self._body_at = b"", 0
        return ParsedResponse(self._status, body, self._keeps_alive)

    def _read_head(self) -> bool:
        end = self._data.find(_HEAD_END)
        if end < 0:
            return False
        line, _, fields = self._data[:end].partition(b"\r\n")
        if not line.startswith(b"HTTP/1.1 ") or not line[9:12].isdigit():
            raise MalformedHttp(f"no status line: {line[:80]!r}")
        self._status = int(line[9:12])
        if self._status == 100:
            self._data = self._data[end + 4 :]
            return self._read_head()
        head = b"\r\n" + fields.lower() + b"\r\n"
        self._length = (
            _CHUNKED if b"\r\ntransfer-encoding: chunked" in head else _content_length(head)
        )
        self._keeps_alive = b"\r\nconnection: close" not in head
        self._body_at = end + 4
        return True


def _content_length(head: bytes) -> int:
    """Return the content length, or _UNTIL_CLOSED if the head has none."""
    at = head.find(b"\r\ncontent-length:")
    if at < 0:
        return _UNTIL_CLOSED
    text = head[at + 17 : head.index(b"\r\n", at + 17)].strip()
    if not text.isdigit():
        raise MalformedHttp(f"content-length {text[:40]!r}")
    return int(text)


def _unchunk(data: bytes, at: int) -> tuple[bytes, int] | None:
    """Return the body and its end, or None if bytes are missing; trailers are not supported."""
    parts: list[bytes] = []
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        try:
            size = int(data[at:line_end].partition(b";")[0], 16)
        except ValueError:
            raise MalformedHttp(f"chunk size {data[at:line_end][:40]!r}") from None
        at = line_end + 2
        if len(data) < at + size + 2:
            return None
        if size == 0:
            return b"".join(parts), at + 2
        parts.append(data[at : at + size])
        at += size + 2
