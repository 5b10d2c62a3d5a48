"""Frames over a socketpair between the processes of an engine.

Each frame is a batch of messages with a length prefix. `FrameAssembler` is pure. One thread owns a
`FrameSocket`: reads never wait, and writes wait at most until a deadline.
"""

import socket
import struct

from kvferry.errors import TransportError

MAX_FRAME_BYTES = 512 * 1024 * 1024
"""The largest frame, far above any real batch; a larger length prefix means a corrupt stream."""

_PREFIX = struct.Struct("!I")
_READ_BYTES = 1 << 18


def pack_frame(payload: bytes) -> bytes:
    if len(payload) > MAX_FRAME_BYTES:
        raise TransportError(
            f"a frame of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}"
        )
    return _PREFIX.pack(len(payload)) + payload


class FrameAssembler:
    """Splits a byte stream into frames, regardless of the chunks in which the stream arrives."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the frames that `chunk` completes, in order."""
        self._pending += chunk
        frames: list[bytes] = []
        start = 0
        while (end := self._frame_end(start)) <= len(self._pending):
            frames.append(bytes(self._pending[start + _PREFIX.size : end]))
            start = end
        del self._pending[:start]
        return frames

    def _frame_end(self, start: int) -> int:
        if len(self._pending) < start + _PREFIX.size:
            return start + _PREFIX.size
        (length,) = _PREFIX.unpack_from(self._pending, start)
        if length > MAX_FRAME_BYTES:
            raise TransportError(
                f"a frame announces {length} bytes, but the limit is {MAX_FRAME_BYTES}"
            )
        return start + _PREFIX.size + int(length)


class FrameSocket:
    """One end of the socketpair.

    `is_open` becomes false when the peer process has closed its end; frames sent before that are
    still delivered.
    """

    def __init__(self, sock: socket.socket, send_timeout_s: float = 60.0) -> None:
        self._sock = sock
        self._send_timeout_s = send_timeout_s
        self._assembler = FrameAssembler()
        self._is_open = True

    @property
    def is_open(self) -> bool:
        return self._is_open

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[bytes]:
        """Return every frame that has arrived; never waits."""
        frames: list[bytes] = []
        self._sock.setblocking(False)
        while self._is_open:
            try:
                chunk = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                chunk = b""
            if not chunk:
                self._is_open = False
            frames += self._assembler.feed(chunk)
        return frames

    def send(self, payload: bytes) -> None:
        """Write one frame.

        Raises TransportError when the peer process is gone or has not read before the deadline.
        """
        self._sock.settimeout(self._send_timeout_s)
        try:
            self._sock.sendall(pack_frame(payload))
        except TimeoutError:
            self._is_open = False
            raise TransportError(
                f"the other process has not read its messages for {self._send_timeout_s:g} s"
            ) from None
        except OSError as error:
            self._is_open = False
            raise TransportError(f"the other process closed its end: {error}") from error

    def close(self) -> None:
        self._is_open = False
        self._sock.close()
