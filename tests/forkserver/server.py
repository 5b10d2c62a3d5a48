"""`python -m tests.forkserver.server FILE MODULE…`: imports the modules once, then forks a process
for each command that a client requests.

The server has one thread, so that forking is safe. It ends when the client closes the connection;
the client must end the forked processes.
"""

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import select
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.forkserver.multiprocessing_spawn import prefork
from tests.forkserver.wire import install_fds, receive_message, send_message, set_environment

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
MS_REC, MS_SLAVE, MNT_DETACH = 1 << 14, 1 << 19, 2

Work = Callable[[], None]


def serve(link: socket.socket) -> Work | None:
    """Fork a process per request. Returns the work to do in a forked process, and None in the
    server when the client is gone.
    """
    reports: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in reports:
                poll.unregister(ready)
                _report(ready, *reports.pop(ready))
                continue
            request = receive_message(link)
            if request is None:
                return None
            words, files = request
            pid = os.fork()
            if pid == 0:
                link.detach()
                return _run_as(words, files)
            for file in files[1:]:
                os.close(file)
            watched = os.pidfd_open(pid)
            reports[watched] = pid, files[0]
            poll.register(watched, select.POLLIN)
            send_message(link, {"pid": pid}, [])


def _report(watched: int, pid: int, report: int) -> None:
    _, status = os.waitpid(pid, 0)
    with suppress(BrokenPipeError):  # the client no longer reads the exit code
        os.write(report, struct.pack("i", os.waitstatus_to_exitcode(status)))
    os.close(report)
    os.close(watched)


def _run_as(words: dict[str, Any], files: list[int]) -> Work | None:
    _, output, *others = files
    os.setpgid(0, words["group"])
    os.dup2(output, 1)
    os.dup2(output, 2)
    install_fds(dict(zip(words["files"], others, strict=True)))
    set_environment(words["variables"])
    os.chdir(words["directory"])
    if words["namespace"]:
        _enter(words["namespace"])
    if (work := prefork(words["spares"])) is not None:
        return work
    module, *sys.argv[1:] = words["arguments"]
    return lambda: void(runpy.run_module(module, run_name="__main__", alter_sys=True))


def void(_: object) -> None:
    return None


def _enter(namespace: str) -> None:
    """Enter the network namespace as `ip netns exec` does, with a /sys that shows its devices."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as space:
        _check(libc.setns(space.fileno(), CLONE_NEWNET))
    _check(libc.unshare(CLONE_NEWNS))
    _check(libc.mount(b"", b"/", None, MS_REC | MS_SLAVE, None))
    libc.umount2(b"/sys", MNT_DETACH)
    _check(libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None))


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    file, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a thread would not be in the processes forked from here"
    )
    gc.collect()
    gc.freeze()
    work = serve(socket.socket(fileno=int(file)))
    if work is not None:
        _run(work)


def _run(work: Work) -> None:
    """Run the work and exit without unloading the imported modules, which would take longer than
    everything else.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main()
