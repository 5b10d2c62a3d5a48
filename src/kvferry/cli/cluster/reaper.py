"""The reaper process: stops all other processes of its process group and removes a directory.

`kvferry up` starts the reaper first, as the leader of a group, and then all other processes into
the group. The reaper waits for the end of its standard input, which is closed when the starter
closes the pipe or dies, kill -9 included. Imports only the standard library, so that the process is
small.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

_KILL_S = 5.0
_POLL_INTERVAL_S = 0.02


def main(arguments: list[str]) -> int:
    """Run `python -m kvferry.cli.cluster.reaper GRACE_S DIRECTORY`; return 0 if the group is empty.

    GRACE_S is the time that members have to exit after SIGTERM before the reaper sends SIGKILL.
    """
    grace_s, directory = float(arguments[0]), arguments[1]
    # The reaper must survive every signal that is sent to the whole group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(4096):
        pass
    is_empty = _stop_others(signal.SIGTERM, grace_s) or _stop_others(signal.SIGKILL, _KILL_S)
    shutil.rmtree(directory, ignore_errors=True)
    return 0 if is_empty else 1


def members_of_group(group: int) -> set[int]:
    """Return the living processes of a process group, without zombies.

    A zombie is dead and waits for its parent, not for the reaper.
    """
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _is_member(entry, group)
    }


def _stop_others(number: signal.Signals, grace_s: float) -> bool:
    """Signal all other members; return whether the reaper is alone in the group before the
    deadline.
    """
    deadline = time.monotonic() + grace_s
    signaled: set[int] = set()
    while others := members_of_group(os.getpgrp()) - {os.getpid()}:
        # Signal new members too: a process may have been forked while the reaper listed the group.
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
        # The fields are: pid (name) state parent group ...; the name may hold any character, also
        # ")".
        state, _, found = (
            (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:3]
        )
    except (OSError, ValueError):
        return False
    return int(found) == group and state not in "ZX"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
