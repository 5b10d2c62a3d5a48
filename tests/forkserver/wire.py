"""Messages that carry JSON and file descriptors to a process that was forked before its task was
known. Standard library only: vLLM's interpreter runs this too.
"""

import array
import fcntl
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MAX_BYTES = 1 << 20
MAX_FILES = 250


def send_message(link: socket.socket, words: Mapping[str, Any], files: Sequence[int]) -> None:
    data = json.dumps(words).encode()
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_BYTES)
    link.sendmsg(
        [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    )


def receive_message(link: socket.socket) -> tuple[Any, list[int]] | None:
    """Receive one message; None if the other side has closed the connection."""
    files = array.array("i")
    try:
        data, ancillary, _, _ = link.recvmsg(
            MAX_BYTES, socket.CMSG_SPACE(MAX_FILES * files.itemsize)
        )
    except ConnectionResetError:
        return None
    for _, _, content in ancillary:
        files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return (json.loads(data), list(files)) if data else None


def install_fds(files: Mapping[int, int]) -> None:
    """Move each file descriptor (value) to its number (key), and close all others except 0, 1 and
    2.
    """
    beyond = max(*map(int, os.listdir("/proc/self/fd")), *files, 2) + 1
    parked = {number: fcntl.fcntl(file, fcntl.F_DUPFD, beyond) for number, file in files.items()}
    os.closerange(3, beyond)
    for number, file in parked.items():
        os.dup2(file, number, inheritable=True)
    os.closerange(beyond, max(parked.values(), default=beyond) + 1)


def set_environment(variables: Mapping[str, str]) -> None:
    for name in [*os.environ]:
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)
