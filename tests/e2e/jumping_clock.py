"""A wall clock for one process that jumps on command. The other clocks, the kernel's times of files
and all other processes are not changed: a host whose clock is wrong writes to a disk of another
host in the same way.

A small library, loaded before the others, adds seconds from a mapped file to the wall clock.
"""

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset;

__attribute__((constructor)) static void map_offset(void) {
    int file = open(getenv("KVFERRY_TEST_CLOCK"), O_RDONLY);
    void *mapped = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) abort();
    offset = mapped;
}

int clock_gettime(clockid_t id, struct timespec *found) {
    int result = syscall(SYS_clock_gettime, id, found);
    if (offset && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) found->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


@dataclass(frozen=True)
class JumpingClock:
    library: Path
    offset: Path

    @property
    def command(self) -> tuple[str, ...]:
        """The command prefix that starts a process with this clock."""
        return ("env", f"LD_PRELOAD={self.library}", f"KVFERRY_TEST_CLOCK={self.offset}")

    def jump(self, seconds: int) -> None:
        """Let the clock differ from this machine's by so many seconds."""
        with self.offset.open("r+b") as file:
            file.write(struct.pack("l", seconds))


def jumping_clock(folder: Path) -> JumpingClock:
    """Build the library, or skip the test."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, clock = folder / "clock.c", JumpingClock(folder / "clock.so", folder / "offset")
    source.write_text(SOURCE)
    clock.offset.write_bytes(struct.pack("l", 0))
    command = ["cc", "-shared", "-fPIC", "-O", "-o", str(clock.library), str(source)]
    subprocess.run(command, check=True)
    return clock
