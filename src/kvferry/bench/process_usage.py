"""What a process of this machine holds and has used, from /proc and, on a GPU, from its driver."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import KVFerryError

__all__ = [
    "ProcessUsage",
    "cpu_seconds",
    "device_bytes_by_process",
    "parse_device_bytes",
    "process_tree",
    "read_usage",
    "run_queue_wait_s",
]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NVIDIA_SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
NVIDIA_SMI_S = 20.0


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    rss_bytes: int
    files: int
    threads: int
    device_bytes: int = 0
    """Of GPUs, as the driver counts it; 0 where it does not say."""
    torch_bytes: int = 0
    """What of it torch holds, as the process says."""


def read_usage(pid: int) -> ProcessUsage:
    """KVFerryError when the process has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        resident = int((folder / "statm").read_text().split()[1])
        return ProcessUsage(
            resident * PAGE_BYTES, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task"))
        )
    except (OSError, IndexError) as error:
        raise KVFerryError(f"process {pid} cannot be looked at: {error}") from None


def device_bytes_by_process() -> dict[int, int]:
    """What each process uses of GPUs. Empty where there is no driver; inside a container it may
    know no process by our number.
    """
    try:
        ran = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_device_bytes(ran.stdout)


def parse_device_bytes(text: str) -> dict[int, int]:
    """Lines of `pid, MiB`; those without a number are left out, those of one process added up."""
    found: dict[int, int] = {}
    for line in text.splitlines():
        pid, _, mebibytes = line.partition(",")
        if pid.strip().isdecimal() and mebibytes.strip().isdecimal():
            found[int(pid)] = found.get(int(pid), 0) + int(mebibytes) * 2**20
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads so far."""
    # The name is in brackets and may hold anything; what follows the last bracket are numbers.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_queue_wait_s(pid: int) -> float:
    """What its threads that still live have waited so far for a core while they could have run; 0
    where the kernel does not count it.
    """
    waited = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            waited += int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):
            continue
    return waited / 1e9


def process_tree(pid: int) -> list[int]:
    """A process and all below it."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return [pid, *(member for child in children for member in process_tree(child))]
