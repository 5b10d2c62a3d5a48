"""The agents that this process has started, and skips where Mooncake cannot be loaded."""

from contextlib import suppress
from functools import cache

import psutil
import pytest
from tests.transports.sides import mooncake_side

from kvferry.errors import MissingDependency

AGENT = "kvferry.transports.mooncake.agent"


def agents(pid: int | None = None) -> list[psutil.Process]:
    """The agents of a process, the oldest first."""
    found = [child for child in psutil.Process(pid).children() if _is_agent(child)]
    return sorted(found, key=lambda child: child.create_time())


def _is_agent(process: psutil.Process) -> bool:
    # A process that has ended, but that its parent has not waited for, has no command line.
    with suppress(psutil.NoSuchProcess):
        return AGENT in process.cmdline()
    return False


def skip_without_mooncake() -> None:
    if missing := _missing():
        pytest.skip(missing)


@cache
def _missing() -> str:
    try:
        mooncake_side().close()
    except MissingDependency as missing:
        return str(missing)
    return ""
