"""What the tiers of one rank hold, for the readers of an engine's KV events. Pure.

A rank knows only of entries that it has stored itself, or has found in a tier. It reports changes:
an entry that is stored and evicted between two reports is never mentioned.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.tiers.base import EntryKey
from kvferry.tiers.commands import ContentsChanged

MAX_ENTRIES = 100_000
"""Of each tier: nothing else bounds what an object store holds, and the scheduler keeps a kilobyte
for each entry.
"""


@dataclass(slots=True)
class TierContents:
    """The entries that a rank's tiers hold, and what has changed since the last report."""

    max_entries: int = MAX_ENTRIES
    """If a tier has more, those that were used least recently are reported as removed."""
    _held: dict[str, OrderedDict[EntryKey, None]] = field(default_factory=dict, init=False)
    """By tier, the least recently used first."""
    _changes: dict[str, dict[EntryKey, bool]] = field(default_factory=dict, init=False)
    """By tier: whether the entry is now held, if the last report said otherwise."""
    _is_cleared: bool = field(default=False, init=False)

    def add(self, tier: str, key: EntryKey) -> None:
        """Note that a tier holds an entry."""
        held = self._held.setdefault(tier, OrderedDict())
        if key in held:
            held.move_to_end(key)
            return
        held[key] = None
        self._change(tier, key, is_held=True)
        if len(held) > self.max_entries:
            self.remove(tier, next(iter(held)))

    def remove(self, tier: str, key: EntryKey) -> None:
        """Note that a tier does not hold an entry any more. Unknown entries are ignored."""
        held = self._held.get(tier)
        if held is not None and key in held:
            del held[key]
            self._change(tier, key, is_held=False)

    def clear(self) -> None:
        """Forget all entries: the engine must not use them any more."""
        self._held.clear()
        self._changes.clear()
        self._is_cleared = True

    def take_change(self) -> ContentsChanged | None:
        """What has changed since the last call; None if nothing has."""
        is_cleared, self._is_cleared = self._is_cleared, False
        changes, self._changes = self._changes, {}
        stored, removed = (
            {
                tier: keys
                for tier, changed in changes.items()
                if (keys := tuple(key for key, is_held in changed.items() if is_held is wanted))
            }
            for wanted in (True, False)
        )
        return (
            ContentsChanged(stored, removed, is_cleared)
            if stored or removed or is_cleared
            else None
        )

    def _change(self, tier: str, key: EntryKey, *, is_held: bool) -> None:
        changed = self._changes.setdefault(tier, {})
        if key in changed:
            del changed[key]  # it is again as the last report said
        else:
            changed[key] = is_held
