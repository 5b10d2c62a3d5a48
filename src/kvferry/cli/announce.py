"""How a child process tells its parent where it listens: one line on a pipe whose number is in the environment.

The child binds port 0 itself, so no port is picked by one process and taken by another.
"""

from collections.abc import MutableMapping

from kvferry.types import Address

__all__ = ["ANNOUNCE_FD_VARIABLE", "announce_address", "parse_announcement"]

ANNOUNCE_FD_VARIABLE = "KVFERRY_ANNOUNCE_FD"


def announce_address(address: Address, environ: MutableMapping[str, str]) -> None:
    """Child side, once, when connections are accepted. Without a waiting parent it does nothing."""
    text = environ.pop(ANNOUNCE_FD_VARIABLE, "")
    if not text.isdecimal():
        return
    try:
        with open(int(text), "w", encoding="ascii", errors="replace") as pipe:
            pipe.write(f"{address.host} {address.port}\n")
    except OSError:
        # The parent has stopped listening; it will stop us too.
        return


def parse_announcement(line: bytes) -> Address | None:
    """Parent side. None: the child closed the pipe without an address, so it has failed."""
    host, _, port = line.decode("ascii", errors="replace").strip().partition(" ")
    return Address(host, int(port)) if host and port.isdecimal() and 0 < int(port) < 65536 else None
