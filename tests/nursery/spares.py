"""A process that `multiprocessing` has "spawned", without its imports: it was forked earlier, when its parent had not begun to run.

It is the spawning process's own child and gets the same files, variables and signal mask as one that is started anew, and from then on runs
the same code (`multiprocessing.spawn.spawn_main`).
"""

import ast
import multiprocessing.spawn
import multiprocessing.util
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tests.nursery.handing import hand_over, place, set_environment, take

__all__ = ["keep_spare"]

CALL = re.compile(r"spawn_main\((.*)\)$")
Work = Callable[[], None]


def keep_spare(depth: int) -> Work | None:
    """Fork one, to be used by the next spawn of this process; `depth - 1` generations of its own children are born likewise.

    None: this is the process that forked. In the new one it returns, when it is wanted, what it has to do.
    """
    if depth <= 0:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Ctrl-C is for those who run already; what is handed over says whether it concerns this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _spawn_by(ours, pid)
        return None
    ours.close()
    wanted = take(theirs)
    if wanted is None:
        os._exit(0)
    theirs.detach()
    return _become(*wanted, depth=depth)


def _spawn_by(link: socket.socket, pid: int) -> None:
    anew = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, words: Sequence[str], files: Sequence[int]) -> int:
        call = CALL.search(words[-2]) if words[-1] == "--multiprocessing-fork" else None
        if call is None:
            return int(anew(path, words, files))
        multiprocessing.util.spawnv_passfds = anew
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        told = {"call": call[1], "files": sorted(files), "variables": dict(os.environ), "directory": os.getcwd(), "mask": mask}
        with link:
            hand_over(link, told, sorted(files))
        return pid

    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def _become(told: dict[str, Any], files: list[int], depth: int) -> Work | None:
    place(dict(zip(told["files"], files, strict=True)))
    set_environment(told["variables"])
    os.chdir(told["directory"])
    if (work := keep_spare(depth - 1)) is not None:
        return work
    signal.pthread_sigmask(signal.SIG_SETMASK, told["mask"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    arguments = {word.partition("=")[0].strip(): ast.literal_eval(word.partition("=")[2]) for word in told["call"].split(",")}
    return lambda: multiprocessing.spawn.spawn_main(**arguments)
