"""Memory, files, threads and CPU time of a process, from /proc and, for GPUs, from nvidia-smi."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import KVFerryError

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
NVIDIA_SMI_S = 20.0


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The resources that a process holds at one moment."""

    rss_bytes: int
    files: int
    threads: int
    device_bytes: int = 0
    """The GPU memory according to the driver; 0 where the driver does not report the process."""
    torch_bytes: int = 0
    """The part of the GPU memory that torch holds, as reported by the process."""


def read_usage(pid: int) -> ProcessUsage:
    """Read the usage of a process; raise KVFerryError if the process has exited."""
    folder = Path(f"/proc/{pid}")
    try:
        resident = int((folder / "statm").read_text().split()[1])
        return ProcessUsage(
            resident * PAGE_BYTES, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
        )
    except (OSError, IndexError) as error:
        raise KVFerryError(f"process {pid} cannot be inspected: {error}") from None


def device_bytes_by_process() -> dict[int, int]:
    """Return the GPU memory of each process by pid; empty where there is no driver.

    Inside a container the driver may report other pids than the container sees.
    """
    try:
        ran = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_device_bytes(ran.stdout)


def parse_device_bytes(text: str) -> dict[int, int]:
    """Parse lines of `pid, MiB`; skip lines without a number, add up the lines of one process."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdecimal() and mebibytes.strip().isdecimal():
            found[int(pid)] = found.get(int(pid), 0) + int(mebibytes) * 2**20
    return found


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of all threads of a process so far."""
    # The name is in parentheses and may hold any character; the fields after the last one are
    # numbers.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_queue_wait_s(pid: int) -> float:
    """Return the time that the living threads have waited for a core while runnable.

    The result is 0 where the kernel does not count this time.
    """
    waited = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            waited += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return waited / 1e9


def process_tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return [pid, *(member for child in children for member in process_tree(child))]
