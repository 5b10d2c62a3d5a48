from collections.abc import Sequence

from kvferry.transports.copy.checksum import Checksums
from kvferry.transports.copy.segments import Bytes, Offsets

def copy_segments(
    target: Bytes, source: Bytes, targets: Offsets, sources: Offsets, sizes: Offsets
) -> None: ...
def are_within(offsets: Offsets, last: int) -> bool: ...
def put_all(table: Offsets, first: int, offsets: Offsets, last: int) -> int: ...
def put_places(
    table: Offsets,
    first: int,
    sources: Sequence[int],
    targets: Sequence[int],
    rest: tuple[int, int, int],
) -> int: ...
def poll_until(function: int, argument: int, waiting: int, seconds: float) -> int: ...
def spin_wait(seconds: float) -> None: ...
def start_kernel(
    calls: tuple[int, int, int],
    table: tuple[int, int, int],
    kernel: tuple[int, int, int, int],
    grid: tuple[int, int],
    numbers: tuple[int, int],
    stream: int,
    event: int,
) -> tuple[int, int]: ...
def copy_and_sum(targets: Offsets, sources: Offsets, sizes: Offsets, sums: Checksums) -> None: ...
