"""The contract of a storage tier.

A tier holds immutable entries of one namespace by key. An entry is the KV of one chunk of tokens
in one KV-cache group of one rank. A key names the contents, so an entry never changes: two writers
of one key write the same bytes. A tier is a cache: it may forget any entry at any time, and never
returns bytes that it has not checked.

The conformance suite is `kvferry.testing.tier_conformance`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol, overload, runtime_checkable

__all__ = [
    "KEY_BYTES",
    "EntryKey",
    "EntryKeys",
    "LoadOutcome",
    "LoadResult",
    "StoreOutcome",
    "StoreResult",
    "Tier",
    "TierUsage",
    "WatchesEntries",
]

KEY_BYTES = 32

EntryKey = NewType("EntryKey", bytes)
"""`KEY_BYTES` bytes. Equal keys in one namespace mean equal contents."""


@dataclass(frozen=True, slots=True)
class EntryKeys(Sequence[EntryKey]):
    """Keys in one piece of memory: a prompt has hundreds, and the engine's thread has no time for
    an object for each.
    """

    joined: bytes = b""

    def __len__(self) -> int:
        return len(self.joined) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> EntryKey: ...
    @overload
    def __getitem__(self, index: slice) -> "EntryKeys": ...
    def __getitem__(self, index: int | slice) -> "EntryKey | EntryKeys":
        if isinstance(index, slice):
            first, end, step = index.indices(len(self))
            assert step == 1
            return EntryKeys(self.joined[KEY_BYTES * first : KEY_BYTES * end])
        at = KEY_BYTES * range(len(self))[index]
        return EntryKey(self.joined[at : at + KEY_BYTES])

    def __reduce__(self) -> tuple[type["EntryKeys"], tuple[bytes]]:
        return EntryKeys, (self.joined,)  # twice as fast as the pickling of dataclasses

    def __iter__(self) -> Iterator[EntryKey]:
        for at in range(0, len(self.joined), KEY_BYTES):
            yield EntryKey(self.joined[at : at + KEY_BYTES])


class LoadOutcome(StrEnum):
    LOADED = "loaded"
    MISSING = "missing"
    REFUSED = "refused"
    """The entry is damaged, truncated, forged, or of another namespace, key or format. The tier
    has removed it, if the storage permits.
    """
    FAILED = "failed"
    """The storage did not answer, or answered with an error."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    outcome: LoadOutcome
    reason: str = ""
    """One sentence for the log if the entry was refused or the storage failed."""


class StoreOutcome(StrEnum):
    STORED = "stored"
    PRESENT = "present"
    """The tier had the entry already."""
    DROPPED = "dropped"
    """The tier did not try: it is full and may not evict, or it waits after a failure."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoreResult:
    outcome: StoreOutcome
    reason: str = ""
    """One sentence for the log if the entry was dropped or the storage failed."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds, as far as this process knows, and what it has evicted since it started."""

    used_bytes: int = 0
    num_entries: int = 0
    max_bytes: int | None = None
    """None if only the storage itself bounds the tier."""
    num_evicted: int = 0


class Tier(Protocol):
    """A store of entries of one namespace.

    - Any thread may call any method; calls may block, but every wait has a deadline of the tier.
    - No method raises for what other writers or bad entries do, nor, `find` and `find_prefix`
      excepted, for what the storage does; `LoadResult` and `StoreResult` say what happened.
    - An entry becomes visible whole or not at all, also if the writer is killed.
    - `load` returns LOADED only if every byte of `into` was checked. After any other outcome, the
      contents of `into` are undefined.
    """

    @property
    def name(self) -> str:
        """The name in settings, metrics and logs: `disk`, `object`."""

    def find(self, keys: Sequence[EntryKey]) -> list[bool]:
        """Whether each entry is stored. A hint: `load` alone decides. Raises `StorageFailed` if
        the storage cannot say.
        """

    def find_prefix(self, keys: Sequence[EntryKey]) -> int:
        """How many leading keys are stored, found with few requests: an implementation may assume
        that a stored key's predecessors are stored too. A hint, like `find`, and raises like it.
        """

    def load(self, key: EntryKey, into: memoryview) -> LoadResult:
        """Read one entry of exactly `len(into)` bytes. `into` starts at a page boundary."""

    def store(self, key: EntryKey, payload: memoryview) -> StoreResult:
        """Write one entry. `payload` starts at a page boundary and is not changed meanwhile."""

    def remove(self, keys: Sequence[EntryKey]) -> None:
        """Remove entries; a missing entry is no error."""

    def usage(self) -> TierUsage: ...

    def close(self) -> None:
        """Stop the tier's threads and release its resources. Idempotent; stored entries stay."""


@runtime_checkable
class WatchesEntries(Protocol):
    """A tier that notices when entries disappear, by its own eviction or otherwise. Without it, an
    engine notices only when it wants to load the entry.
    """

    def watch(self, keys: Sequence[EntryKey]) -> None:
        """Report these entries once by `take_lost` when they are gone. Any delay is allowed."""

    def take_lost(self) -> list[EntryKey]:
        """The watched entries that were found to be gone since the last call."""
