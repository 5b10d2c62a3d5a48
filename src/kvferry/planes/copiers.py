"""How a batch of runs is copied: by the native function, or by numpy where kvferry was installed without a compiler.

Called by the thread that owns the transport. Both release the GIL while they copy. Why there is a native function, and what it
gains: docs/decisions/018-copies-by-a-compiled-loop.md.
"""

from collections.abc import Callable
from typing import Protocol

from kvferry.planes.compiled import native_or
from kvferry.planes.runs import Bytes, Descriptors, Offsets

__all__ = ["Copier", "copy_by_numpy", "fastest_copier"]


CopySegments = Callable[[Bytes, Bytes, Offsets, Offsets, Offsets], None]


class Copier(Protocol):
    def __call__(self, target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
        """Copy each run from its `local` place in the source to its `remote` place in the target. All lie within: checked before."""


def fastest_copier() -> Copier:
    copy_segments: CopySegments | None = native_or("copy_segments", None)
    if copy_segments is None:
        return copy_by_numpy

    def copy_compiled(target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
        copy_segments(target, source, descriptors.remote, descriptors.local, descriptors.size_bytes)

    return copy_compiled


def copy_by_numpy(target: Bytes, source: Bytes, descriptors: Descriptors) -> None:
    for origin, to, size in zip(descriptors.local.tolist(), descriptors.remote.tolist(), descriptors.size_bytes.tolist(), strict=True):
        target[to : to + size] = source[origin : origin + size]
