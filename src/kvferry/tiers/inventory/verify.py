"""Checks all entries of a storage, and removes the damaged ones.

An entry whose MAC does not match is damaged, or this process has another secret than the engines.
So such entries are removed only after some other entry has proven the secret right.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import groupby, islice

from kvferry.tiers.inventory.base import CheckResult, Condition, Inventory, NoteProgress

BATCH_SIZE = 64
"""Entries that are checked at a time; bounds the memory of a walk."""
MAX_LISTED = 1000
MAX_POSTPONED = 100_000
"""Removals that wait for a proof of the secret."""


class OnDamage(Enum):
    REPORT = auto()
    REMOVE = auto()


@dataclass(frozen=True, slots=True)
class BadEntry:
    namespace: str
    name: str
    result: CheckResult


@dataclass(slots=True)
class Verification:
    """What was found so far."""

    num_checked: int = 0
    num_sound: int = 0
    num_bad: int = 0
    """Damaged and unproven entries."""
    num_unchecked: int = 0
    num_removed: int = 0
    bad: list[BadEntry] = field(default_factory=list)
    """The first bad and unchecked entries, at most `MAX_LISTED`."""

    @property
    def is_secret_proven(self) -> bool:
        return self.num_sound > 0

    def note(self, bad: BadEntry) -> None:
        if bad.result.condition is Condition.UNCHECKED:
            self.num_unchecked += 1
        else:
            self.num_bad += 1
        if len(self.bad) < MAX_LISTED:
            self.bad.append(bad)


def verify(
    inventory: Inventory,
    namespaces: Sequence[str],
    on_damage: OnDamage,
    num_threads: int,
    note: NoteProgress,
) -> Verification:
    """Check all entries of the namespaces. Raises `TransportError` if the storage cannot be
    listed.
    """
    found = Verification()
    unproven: list[BadEntry] = []
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvferry-verify") as pool:
        for namespace in namespaces:
            check = partial(inventory.check, namespace)
            for names in _batches(inventory.objects(namespace)):
                bad = _count(found, namespace, names, pool.map(check, names))
                if on_damage is OnDamage.REMOVE:
                    unproven += (each for each in bad if not _is_damaged(each))
                    _remove(inventory, found, list(filter(_is_damaged, bad)))
                    if found.is_secret_proven:
                        _remove(inventory, found, unproven)
                        unproven.clear()
                    del unproven[MAX_POSTPONED:]
                note(found.num_checked)
    return found


def _count(
    found: Verification, namespace: str, names: Sequence[str], results: Iterator[CheckResult]
) -> list[BadEntry]:
    """Count the results and return the damaged and unproven entries."""
    bad = []
    for name, result in zip(names, results, strict=True):
        found.num_checked += result.condition is not Condition.GONE
        found.num_sound += result.condition is Condition.SOUND
        if result.condition not in (Condition.SOUND, Condition.GONE):
            found.note(BadEntry(namespace, name, result))
            if result.condition is not Condition.UNCHECKED:
                bad.append(BadEntry(namespace, name, result))
    return bad


def _is_damaged(bad: BadEntry) -> bool:
    return bad.result.condition is Condition.DAMAGED


def _remove(inventory: Inventory, found: Verification, bad: Sequence[BadEntry]) -> None:
    for namespace, alike in groupby(bad, lambda each: each.namespace):
        found.num_removed += inventory.remove(namespace, [each.name for each in alike])


def _batches(names: Iterator[str]) -> Iterator[list[str]]:
    while batch := list(islice(names, BATCH_SIZE)):
        yield batch
