"""The tasks that a rank's jobs give to other threads, and the results. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.tiers.base import LoadResult, ObjectKey, StoreResult
from kvferry.transports.base import RowBlocks


@dataclass(frozen=True, slots=True)
class SaveRows:
    """Copy blocks of the cache into rows; the result is a `CopyResult`."""

    task_id: int
    rows: tuple[RowBlocks, ...]


@dataclass(frozen=True, slots=True)
class LoadRows:
    """Copy rows into blocks of the cache; the result is a `CopyResult`."""

    task_id: int
    rows: tuple[RowBlocks, ...]


@dataclass(frozen=True, slots=True)
class ReadObject:
    """Read an object into a row; the result is a `LoadResult`."""

    task_id: int
    tier: str
    key: ObjectKey
    row: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WriteObject:
    """Write a row to a tier; the result is a `StoreResult`."""

    task_id: int
    tier: str
    key: ObjectKey
    row: int
    size_bytes: int


Task = SaveRows | LoadRows | ReadObject | WriteObject


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The checksums of the copied rows; none if the copy failed for the given reason."""

    checksums: Sequence[int] = ()
    reason: str = ""


TaskResult = CopyResult | LoadResult | StoreResult
