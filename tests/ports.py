"""Ports for servers that must be told theirs before they run. Where a server can take one itself and say which, let it."""

import random
import socket
from contextlib import suppress

__all__ = ["free_ports"]

NEVER_GIVEN = range(20_000, 32_768)
"""Below those from which Linux gives one to whoever connects to somebody: such a port may be taken in the moment after it was looked at."""
LOOPBACK = "127.0.0.1"
_rng = random.SystemRandom()


def free_ports(count: int) -> list[int]:
    """Nobody listens on them, and all are different."""
    found: list[int] = []
    while len(found) < count:
        port = _rng.choice(NEVER_GIVEN)
        with suppress(OSError), socket.create_server((LOOPBACK, port)):
            found += [port] if port not in found else []
    return found
