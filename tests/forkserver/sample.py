"""`python -m tests.forkserver.sample WORD…`: prints the environment that a process and its spawned
child find at their start. Exits with code 3.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

UNLIKE = ("KVFERRY_ANNOUNCE_FD",)


def found() -> dict[str, Any]:
    variables = [(name, value) for name, value in os.environ.items() if name not in UNLIKE]
    ignored = [
        number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN
    ]
    return {
        "words": sys.argv[1:],
        "variables": hashlib.sha256(repr(sorted(variables)).encode()).hexdigest(),
        "directory": os.getcwd(),
        "group": os.getpgrp(),
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "ignored": sorted(ignored),
        "input": os.fstat(0).st_rdev,
        "num_files": len(os.listdir("/proc/self/fd")),
    }


def tell(link: Connection, parent: int) -> None:
    assert os.getppid() == parent, "it is the child of whoever spawned it"
    link.send(found())
    link.close()
    sys.exit(7)


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    os.environ["LATE"] = "set just before the spawn"
    ours, theirs = multiprocessing.Pipe()
    spawned = multiprocessing.get_context("spawn").Process(target=tell, args=(theirs, os.getpid()))
    spawned.start()
    theirs.close()
    request = ours.recv()
    spawned.join(60)
    print(json.dumps({"own": found(), "spawned": request, "code": spawned.exitcode}), flush=True)
    return 3


if __name__ == "__main__":
    sys.exit(main())
