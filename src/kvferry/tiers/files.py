"""How the tiers read files in folders in which other processes write."""

import os
import stat
from pathlib import Path

OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""O_NONBLOCK: opening a FIFO in place of a file must not block."""


class DamagedFile(OSError):
    """A file is not as it was written."""


def read_regular_file(path: str | Path, max_bytes: int) -> bytes:
    """The first `max_bytes` of a file. OSError for anything that is not a regular file; a link is
    not followed.
    """
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | OPEN_FLAGS)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DamagedFile(f"{path} is not a file")
        return file.read(max_bytes)
