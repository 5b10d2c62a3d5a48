"""A bell that any thread may ring and one thread waits for together with its sockets."""

import contextlib
import socket

__all__ = ["Wakeup"]


class Wakeup:
    """Rings collapse: however many came, the waiter wakes once and calls `clear`. After `close` a ring does nothing."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        # A full buffer means that the waiter is going to wake anyway; a closed one that nobody waits any more.
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")

    def clear(self) -> bool:
        """Whether it rang since the last call."""
        was_woken = False
        with contextlib.suppress(BlockingIOError):
            while self._receiver.recv(4096):
                was_woken = True
        return was_woken

    def fileno(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()
