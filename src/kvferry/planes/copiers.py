"""How a batch of runs is copied: by the compiled loop, or by numpy where kvferry was installed without a compiler.

Called by the thread that owns the plane. Both let go of the interpreter's lock while they copy. Why there is a compiled loop, and what it
gains: docs/decisions/018-copies-by-a-compiled-loop.md.
"""

from importlib import import_module
from typing import Protocol

from kvferry.planes.runs import Bytes, Runs

__all__ = ["Copier", "copy_by_numpy", "fastest_copier", "missing_loops"]

COMPILED = "are_within", "ask_until", "copy_runs", "linger", "put_all", "put_places", "start_kernel"
"""What `_copy.c` has. Without some of it all works, slower."""


class Copier(Protocol):
    def __call__(self, target: Bytes, source: Bytes, runs: Runs) -> None:
        """Copy each run from its `local` place in the source to its `remote` place in the target. All lie within: checked before."""


def fastest_copier() -> Copier:
    try:
        from kvferry.planes._copy import copy_runs
    except ImportError:
        return copy_by_numpy

    def copy_compiled(target: Bytes, source: Bytes, runs: Runs) -> None:
        copy_runs(target, source, runs.remote, runs.local, runs.size_bytes)

    return copy_compiled


def missing_loops() -> tuple[str, ...]:
    """What is not compiled here: all where kvferry was installed without a compiler, some where that was before they were written."""
    try:
        compiled = import_module("kvferry.planes._copy")
    except ImportError:
        return COMPILED
    return tuple(name for name in COMPILED if not hasattr(compiled, name))


def copy_by_numpy(target: Bytes, source: Bytes, runs: Runs) -> None:
    for origin, to, size in zip(runs.local.tolist(), runs.remote.tolist(), runs.size_bytes.tolist(), strict=True):
        target[to : to + size] = source[origin : origin + size]
