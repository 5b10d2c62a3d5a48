"""How much memory this host or container has left, asked before a large allocation.

Shared memory that exceeds a container's limit makes the kernel kill a process of the container.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import ConfigError

MAX_SHARE = 0.9
"""Largest share of the available memory that one allocation may take."""


class _CgroupFiles(NamedTuple):
    """Files of one cgroup version, and the name of a line in `stat`."""

    limit: str
    usage: str
    stat: str
    cached: str
    """The file pages that the kernel frees when the container needs memory. They are part of
    `usage`: a container that has read a checkpoint would otherwise seem to be full.
    """


_CGROUPS = (
    _CgroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _CgroupFiles(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def check_fits(size_bytes: int, available: int) -> None:
    """ConfigError if shared memory of this size leaves the host too little memory: the kernel's OOM
    killer could then kill any process of the host.
    """
    if size_bytes > available * MAX_SHARE:
        raise ConfigError(
            f"{size_bytes} bytes of shared memory do not fit in the {available} bytes that are "
            "free in this host or container; make the cache smaller"
        )


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory the kernel can give without swapping, within the container's limit."""
    available = _amounts(root / "proc/meminfo")["MemAvailable:"] * 1024
    folder = root / "sys/fs/cgroup"
    for files in _CGROUPS:
        with suppress(OSError, ValueError):  # no such limit, or "max"
            limit = int((folder / files.limit).read_text())
            usage = int((folder / files.usage).read_text())
            cached = 0
            with suppress(OSError):
                cached = _amounts(folder / files.stat).get(files.cached, 0)
            available = min(available, limit - usage + cached)
    return max(0, available)


def _amounts(path: Path) -> dict[str, int]:
    """The second word of each line, by the first."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}
