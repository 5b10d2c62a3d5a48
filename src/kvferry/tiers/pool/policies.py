"""Eviction policies: which entry leaves a full pool. Pure.

`LruPolicy` evicts the entry that was used least recently. `ArcPolicy` (Megiddo and Modha, "ARC: a
self-tuning, low overhead replacement cache", FAST 2003) keeps entries that were used once apart
from entries that were used again, so that one long prompt that never returns cannot evict a
conversation that does.

A policy knows keys only. Its owner tells it what is stored and used, and which keys are pinned: a
pinned key is being written or read and cannot leave now.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from kvferry.tiers.base import EntryKey

IsPinned = Callable[[EntryKey], bool]


class Insertion(NamedTuple):
    """What `EvictionPolicy.insert` did."""

    is_inserted: bool
    """False if all keys are pinned; then nothing has changed."""
    evicted: EntryKey | None = None
    """The key that left, if there was no room."""


class EvictionPolicy(Protocol):
    """Holds at most `capacity` keys, which is at least 1. Every call takes constant time, apart
    from pinned keys that it skips.
    """

    def __init__(self, capacity: int) -> None: ...

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...

    def insert(self, key: EntryKey, is_pinned: IsPinned) -> Insertion:
        """Add a key. If there is no room, one key that is not pinned leaves. A key that is held
        already counts as used.
        """

    def touch(self, key: EntryKey) -> None:
        """Note that an entry was used. Keys that are not held are ignored."""

    def remove(self, key: EntryKey) -> None:
        """Forget a key. Keys that are not held are ignored."""

    def clear(self) -> None: ...


class LruPolicy:
    """Evicts the key that was inserted or used least recently."""

    def __init__(self, capacity: int) -> None:
        self._capacity = _checked(capacity)
        self._keys: OrderedDict[EntryKey, None] = OrderedDict()
        """The keys, least recently used first."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def insert(self, key: EntryKey, is_pinned: IsPinned) -> Insertion:
        if key in self._keys:
            self.touch(key)
            return Insertion(True)
        victim = None
        if len(self._keys) >= self._capacity:
            victim = _first_unpinned(self._keys, is_pinned)
            if victim is None:
                return Insertion(False)
            del self._keys[victim]
        self._keys[key] = None
        return Insertion(True, victim)

    def touch(self, key: EntryKey) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def remove(self, key: EntryKey) -> None:
        self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()


class ArcPolicy:
    """Adaptive replacement. The names are those of the paper:

        t1, t2   keys that are held: inserted once, and used again since
        b1, b2   ghosts: keys that have left t1 and t2, without their entries
        target   the size that t1 should have. A key that returns while it is a ghost shows which
                 list was too short: a ghost of b1 raises the target, a ghost of b2 lowers it.

    Always len(t1) + len(b1) <= capacity, and all four lists have at most 2 * capacity keys. If all
    keys of the list that should shrink are pinned, the other list gives a key.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = _checked(capacity)
        # All four, least recently used first.
        self._t1: OrderedDict[EntryKey, None] = OrderedDict()
        self._t2: OrderedDict[EntryKey, None] = OrderedDict()
        self._b1: OrderedDict[EntryKey, None] = OrderedDict()
        self._b2: OrderedDict[EntryKey, None] = OrderedDict()
        self._target = 0.0

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def __contains__(self, key: object) -> bool:
        return key in self._t1 or key in self._t2

    @property
    def target(self) -> float:
        return self._target

    def insert(self, key: EntryKey, is_pinned: IsPinned) -> Insertion:
        if key in self:
            self.touch(key)
            return Insertion(True)
        target = self._target_after(key)
        victim = None
        if len(self) >= self._capacity:
            victim = self._victim(key, target, is_pinned)
            if victim is None:
                return Insertion(False)
        self._target = target
        if key in self._b1 or key in self._b2:
            self._evict(victim)
            self._b1.pop(key, None)
            self._b2.pop(key, None)
            self._t2[key] = None
        else:
            if victim is not None and len(self._t1) == self._capacity:
                # No ghost of the victim stays: t1 and b1 together are as long as they may be.
                del self._t1[victim]
            else:
                self._forget_a_ghost()
                self._evict(victim)
            self._t1[key] = None
        return Insertion(True, victim)

    def touch(self, key: EntryKey) -> None:
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        elif key in self._t2:
            self._t2.move_to_end(key)

    def remove(self, key: EntryKey) -> None:
        self._t1.pop(key, None)
        self._t2.pop(key, None)

    def clear(self) -> None:
        for keys in (self._t1, self._t2, self._b1, self._b2):
            keys.clear()
        self._target = 0.0

    def _target_after(self, key: EntryKey) -> float:
        if key in self._b1:
            step = max(1.0, len(self._b2) / len(self._b1))
            return min(float(self._capacity), self._target + step)
        if key in self._b2:
            step = max(1.0, len(self._b1) / len(self._b2))
            return max(0.0, self._target - step)
        return self._target

    def _victim(self, key: EntryKey, target: float, is_pinned: IsPinned) -> EntryKey | None:
        size = len(self._t1)
        from_t1 = size > target or (size == target and key in self._b2)
        lists = (self._t1, self._t2) if from_t1 else (self._t2, self._t1)
        for keys in lists:
            victim = _first_unpinned(keys, is_pinned)
            if victim is not None:
                return victim
        return None

    def _forget_a_ghost(self) -> None:
        """Make room for one more key in the lists, before a key that is no ghost is inserted."""
        if len(self._t1) + len(self._b1) >= self._capacity:
            self._b1.popitem(last=False)
        elif len(self) + len(self._b1) + len(self._b2) >= 2 * self._capacity:
            self._b2.popitem(last=False)

    def _evict(self, victim: EntryKey | None) -> None:
        """Make the victim a ghost, if there is one."""
        if victim is None:
            return
        keys, ghosts = (self._t1, self._b1) if victim in self._t1 else (self._t2, self._b2)
        del keys[victim]
        ghosts[victim] = None


POLICIES: dict[str, type[LruPolicy] | type[ArcPolicy]] = {"lru": LruPolicy, "arc": ArcPolicy}
"""The policies by their names in settings."""


def _first_unpinned(keys: Iterable[EntryKey], is_pinned: IsPinned) -> EntryKey | None:
    return next((key for key in keys if not is_pinned(key)), None)


def _checked(capacity: int) -> int:
    if capacity < 1:
        raise ValueError(f"a pool of {capacity} rows holds nothing")
    return capacity
