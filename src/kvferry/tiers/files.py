"""How the tiers read files in folders in which other processes write."""

import os
import stat
from io import BufferedReader
from pathlib import Path

OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: opening a FIFO in place of a file must not block."""


class DamagedFile(OSError):
    """A file is not as it was written."""


def open_regular_file(path: str | Path) -> BufferedReader:
    """Open a file for reading. OSError for anything that is not a regular file; a link is not
    followed.
    """
    return open(path, "rb", opener=_open_regular)


def read_regular_file(path: str | Path, max_bytes: int) -> bytes:
    """The first `max_bytes` of a file. Raises like `open_regular_file`."""
    with open_regular_file(path) as file:
        return file.read(max_bytes)


def _open_regular(path: str, flags: int) -> int:
    opened = os.open(path, flags | OPEN_FLAGS)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        return opened
    os.close(opened)
    raise DamagedFile(f"{path} is not a file")
