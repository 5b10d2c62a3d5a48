"""How a batch of runs is copied: by the compiled loop, or by numpy where kvferry was installed without a compiler.

Called by the thread that owns the plane. Both let go of the interpreter's lock while they copy. Why there is a compiled loop, and what it
gains: docs/decisions/018-copies-by-a-compiled-loop.md.
"""

from collections.abc import Callable
from typing import Protocol

from kvferry.planes.compiled import compiled_or
from kvferry.planes.runs import Bytes, Offsets, Runs

__all__ = ["Copier", "copy_by_numpy", "fastest_copier"]


CopyRuns = Callable[[Bytes, Bytes, Offsets, Offsets, Offsets], None]


class Copier(Protocol):
    def __call__(self, target: Bytes, source: Bytes, runs: Runs) -> None:
        """Copy each run from its `local` place in the source to its `remote` place in the target. All lie within: checked before."""


def fastest_copier() -> Copier:
    copy_runs: CopyRuns | None = compiled_or("copy_runs", None)
    if copy_runs is None:
        return copy_by_numpy

    def copy_compiled(target: Bytes, source: Bytes, runs: Runs) -> None:
        copy_runs(target, source, runs.remote, runs.local, runs.size_bytes)

    return copy_compiled


def copy_by_numpy(target: Bytes, source: Bytes, runs: Runs) -> None:
    for origin, to, size in zip(runs.local.tolist(), runs.remote.tolist(), runs.size_bytes.tolist(), strict=True):
        target[to : to + size] = source[origin : origin + size]
