"""The contract of an inventory: what one storage holds, and how it is checked and cleared.

An inventory walks a storage that engines use at the same time, and never stops them. An entry that
an engine evicts during a walk is gone, not damaged. Walks are streams: a storage may have millions
of entries.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from kvferry.tiers.keys import Namespace
from kvferry.tiers.pool.reader import SegmentInfo

MAX_TEXT_BYTES = 1 << 20
"""The longest description of a namespace that is read."""

NoteProgress = Callable[[int], None]
"""A walk calls it now and then with the number of entries seen so far."""


class Condition(Enum):
    """What a check has found out about an entry."""

    SOUND = "sound"
    GONE = "gone"
    """An engine has removed or replaced the entry since it was listed."""
    DAMAGED = "damaged"
    UNPROVEN = "unproven"
    """The MAC does not match: the entry is damaged, or was sealed with another secret."""
    UNCHECKED = "unchecked"
    """The entry could not be read, or nothing says how to check it."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    condition: Condition
    reason: str = ""
    """Completes the sentence `The object …`, unless the entry is sound or gone."""


@dataclass(frozen=True, slots=True)
class NamespaceSummary:
    namespace: str
    """The digest of the namespace, in hex."""
    factors: Mapping[str, Any] | None
    """What the entries depend on; None if the storage has no valid description."""
    num_objects: int = 0
    used_bytes: int = 0
    last_used_s: float = 0.0
    """Seconds since 1970; 0 if the namespace is empty."""
    segments: tuple[SegmentInfo, ...] = ()
    """Of a host pool."""


class Inventory(Protocol):
    """One storage. `check` may be called by several threads at once.

    Every method but `check` raises `TransportError`, with one sentence, if the storage fails.
    """

    @property
    def tier(self) -> str:
        """The name of the tier: `cpu`, `disk`, `object`."""

    @property
    def place(self) -> str:
        """Where the storage is, for people."""

    def namespaces(self) -> Iterator[str]:
        """The namespaces in the storage, as hex digits."""

    def summary(self, namespace: str, note: NoteProgress) -> NamespaceSummary:
        """Walk through one namespace and add up its entries."""

    def objects(self, namespace: str) -> Iterator[str]:
        """The names of all entries of a namespace, for `check` and `remove`."""

    def check(self, namespace: str, name: str) -> CheckResult:
        """Read one entry and check every byte."""

    def remove(self, namespace: str, names: Sequence[str]) -> int:
        """Remove entries and return how many are gone. Some storages cannot remove single entries,
        and then remove nothing or more.
        """

    def clear(self, namespace: str, note: NoteProgress) -> int:
        """Remove a namespace as far as no engine is writing to it, and return how many entries are
        gone.
        """


def factors_of(namespace: str, text: bytes) -> Mapping[str, Any] | None:
    """The factors in a stored description of a namespace; None if the description is not valid, or
    belongs to another namespace.
    """
    try:
        factors = json.loads(text)
        if not isinstance(factors, dict):
            return None
        factors.pop("format", None)
        return factors if Namespace(factors).hex == namespace else None
    except (ValueError, RecursionError):
        return None
