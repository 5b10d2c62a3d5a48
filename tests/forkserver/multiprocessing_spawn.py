"""Replaces a process that `multiprocessing` would spawn by one that was forked before its parent
started its work, so that it need not import anything.

The forked process is a child of the spawning process and gets the same files, environment variables
and signal mask as a spawned one. From then on it runs the same code
(`multiprocessing.spawn.spawn_main`).
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

from tests.forkserver.wire import install_fds, receive_message, send_message, set_environment

CALL = re.compile(r"spawn_main\((.*)\)$")
Work = Callable[[], None]


def prefork(depth: int) -> Work | None:
    """Fork a process that the next spawn of this process will use. The forked process prepares its
    own children in the same way, for `depth - 1` more generations.

    Returns None in the process that forked. In the forked process it waits for the spawn and
    returns the work to do.
    """
    if depth <= 0:
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Until the spawn, Ctrl-C must not reach the forked process; the spawn request then brings the
    # signal mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    pid = os.fork()
    if pid:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _spawn_by(ours, pid)
        return None
    ours.close()
    wanted = receive_message(theirs)
    if wanted is None:
        os._exit(0)
    theirs.detach()
    return _run_as(*wanted, depth=depth)


def _spawn_by(link: socket.socket, pid: int) -> None:
    spawn_normally = multiprocessing.util.spawnv_passfds

    def spawn(path: bytes, words: Sequence[str], files: Sequence[int]) -> int:
        call = CALL.search(words[-2]) if words[-1] == "--multiprocessing-fork" else None
        if call is None:
            return int(spawn_normally(path, words, files))
        multiprocessing.util.spawnv_passfds = spawn_normally
        mask = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        request = {
            "call": call[1],
            "files": sorted(files),
            "variables": dict(os.environ),
            "directory": os.getcwd(),
            "mask": mask,
        }
        with link:
            send_message(link, request, sorted(files))
        return pid

    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]


def _run_as(request: dict[str, Any], files: list[int], depth: int) -> Work | None:
    install_fds(dict(zip(request["files"], files, strict=True)))
    set_environment(request["variables"])
    os.chdir(request["directory"])
    if (work := prefork(depth - 1)) is not None:
        return work
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    arguments = {
        word.partition("=")[0].strip(): ast.literal_eval(word.partition("=")[2])
        for word in request["call"].split(",")
    }
    return lambda: multiprocessing.spawn.spawn_main(**arguments)
