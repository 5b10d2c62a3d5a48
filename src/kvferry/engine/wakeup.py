"""A bell that any thread may ring and one thread waits for together with its sockets."""

import contextlib
import socket

__all__ = ["Wakeup"]


class Wakeup:
    """Rings collapse: however many came, the waiter wakes once and calls `clear`. After `close` a ring does nothing."""

    def __init__(self) -> None:
        self._waiter, self._ringer = socket.socketpair()
        self._waiter.setblocking(False)
        self._ringer.setblocking(False)

    def ring(self) -> None:
        # A full buffer means that the waiter is going to wake anyway; a closed one that nobody waits any more.
        with contextlib.suppress(OSError):
            self._ringer.send(b"\0")

    def clear(self) -> bool:
        """Whether it rang since the last call."""
        rang = False
        with contextlib.suppress(BlockingIOError):
            while self._waiter.recv(4096):
                rang = True
        return rang

    def fileno(self) -> int:
        return self._waiter.fileno()

    def close(self) -> None:
        self._ringer.close()
        self._waiter.close()
