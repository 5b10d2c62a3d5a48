"""A `kvferry up` with stub processes, for tests that kill it: it prints the pids of its process
group once all processes are up, and then waits.
"""

import os
import sys
import time
from pathlib import Path

from rich.console import Console
from tests.cli.test_processes import StubLaunch

from kvferry.cli.cluster.local_cluster import LocalCluster
from kvferry.cli.cluster.processes import ProcessGroup
from kvferry.cli.cluster.reaper import members_of_group
from kvferry.cli.cluster.startup_view import StartupView


def main() -> None:
    directory = Path(sys.argv[1])
    with ProcessGroup(directory, grace_s=2) as group:
        directory.mkdir()
        (directory / "file").write_text("x")
        cluster = LocalCluster(StubLaunch(sys.argv[2]), os.environ, group.id, start_timeout_s=60)
        console = Console(stderr=True)
        with StartupView(console) as view:
            cluster.start(1, 1, view)
        print(*members_of_group(group.id), flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main()
