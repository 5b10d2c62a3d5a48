"""Tests how much memory kvferry takes for available. No test allocates it: beyond the limit the
kernel would kill unrelated processes.
"""

from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.host_memory import available_bytes, check_fits


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   50 kB\n"})
    return tmp_path


def test_shared_memory_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="make the cache smaller"):
        check_fits(91, available=100)
    check_fits(90, available=100)


def test_a_host_without_a_limit_has_what_the_kernel_says(root: Path) -> None:
    assert available_bytes(root) == 50 * 1024
    write(root, {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5000\n"})
    assert available_bytes(root) == 50 * 1024
    assert available_bytes() > 0


@pytest.mark.parametrize(
    ("limit", "usage", "stat", "cached"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_container_has_its_limit_less_what_cannot_be_freed(
    root: Path, limit: str, usage: str, stat: str, cached: str
) -> None:
    folder = "sys/fs/cgroup"
    write(root, {f"{folder}/{limit}": "20000\n", f"{folder}/{usage}": "15000\n"})
    write(root, {f"{folder}/{stat}": f"active_file 999\n{cached} 4000\n"})
    assert available_bytes(root) == 9000
