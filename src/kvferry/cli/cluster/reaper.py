"""A process that outlives its starter briefly: it stops every other process in its process group
and removes a directory.

`kvferry up` starts it first, as the leader of a group, and every other process into that group. It
waits for the end of its standard input, which comes when the starter closes it or dies, kill -9
included. Imports nothing but the standard library, so that it is small.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

__all__ = ["main", "members_of_group"]

_KILL_S = 5.0
_POLL_INTERVAL_S = 0.02


def main(arguments: list[str]) -> int:
    """`guardian PATIENCE_S DIRECTORY`: how long others may take after SIGTERM before they are
    killed.
    """
    grace_s, directory = float(arguments[0]), arguments[1]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    is_empty = _stop_others(signal.SIGTERM, grace_s) or _stop_others(signal.SIGKILL, _KILL_S)
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if is_empty else 1


def members_of_group(group: int) -> set[int]:
    """Living processes of a process group. Zombies are dead: they wait for their parent, not for
    us.
    """
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _is_member(entry, group)
    }


def _stop_others(number: signal.Signals, grace_s: float) -> bool:
    """Whether we are alone in the group in the end."""
    deadline = time.monotonic() + grace_s
    signaled: set[int] = set()
    while others := members_of_group(os.getpgrp()) - {os.getpid()}:
        # Newcomers are told too: a process may have been forked while we looked.
        for pid in others - signaled:
            _signal(pid, number)
        signaled |= others
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _is_member(entry: Path, group: int) -> bool:
    try:
        # pid (name, which may hold anything) state parent group …
        state, _, found = (
            (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
        )
    except (OSError, ValueError):
        return False
    return int(found) == group and state not in "ZX"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
