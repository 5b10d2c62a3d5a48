"""Store of conversations: D's ticket for the last turn of each conversation.

An entry stays until it is used, expires, is evicted by newer entries, or its D restarts. The key is
tenant and conversation id, so that no tenant can reach another tenant's conversation. A ticket is
used once: `take` removes the ticket, and the turn that uses it brings the next ticket. P only
receives the ticket and may change between turns. Pure: the caller passes `now` (local monotonic
seconds). Used on one thread.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import Instance

_ENTRY_BYTES = 512
"""Approximate size of an entry without its texts."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    """Where the blocks of a conversation's last turn are."""

    params: bytes
    """`kv_transfer_params` as D wrote them; empty if D retained no blocks."""
    decoder: Instance
    prefiller: Instance | None = None


@dataclass(slots=True)
class _StoredTurn:
    turn: LastTurn
    deadline: float
    size: int


@dataclass(slots=True)
class Conversations:
    """The stored turns. Beyond the limits, the least recently written turns are evicted."""

    max_count: int = 10_000
    max_bytes: int = 64 * 1024 * 1024
    margin_s: float = 2.0
    """A ticket is not used in its last seconds: the request needs time to reach P, and P to reach
    D.
    """
    num_bytes: int = field(default=0, init=False)
    _entries: OrderedDict[tuple[str, str], _StoredTurn] = field(
        default_factory=OrderedDict, init=False
    )

    def __post_init__(self) -> None:
        if self.max_count < 0 or self.max_bytes < 0 or self.margin_s < 0:
            raise ConfigError("limits of the conversation store must not be negative")

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: str, conversation: str, turn: LastTurn, ttl_s: float, now: float) -> bool:
        """Store a turn in place of the last one. `ttl_s`: how long D retains the blocks. False if
        the time is too short or the entry too large.
        """
        self._drop((tenant, conversation))
        size = _ENTRY_BYTES + len(turn.params) + len(tenant) + len(conversation)
        if not ttl_s > self.margin_s or size > self.max_bytes or self.max_count == 0:
            return False
        self._entries[tenant, conversation] = _StoredTurn(turn, now + ttl_s - self.margin_s, size)
        self.num_bytes += size
        while len(self._entries) > self.max_count or self.num_bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))
        return True

    def take(self, tenant: str, conversation: str, now: float) -> LastTurn | None:
        """Remove and return the last turn; None if missing or expired."""
        entry = self._drop((tenant, conversation))
        return entry.turn if entry is not None and now < entry.deadline else None

    def forget(self, decoder: Instance) -> int:
        """Drop the turns of a D that was removed or has restarted, because its tickets are invalid.
        Scans all entries, because the case is rare.
        """
        seen = {id(entry.turn.decoder): entry.turn.decoder for entry in self._entries.values()}
        same = {
            number for number, other in seen.items() if other == decoder
        }  # compare each distinct object once: comparing every entry would take most of the time
        return self._drop_all(
            [key for key, entry in self._entries.items() if id(entry.turn.decoder) in same]
        )

    def expire(self, now: float) -> int:
        """Drop expired turns to save memory; `take` checks the deadline itself. Scans all entries,
        so one call every few seconds is enough.
        """
        return self._drop_all(
            [key for key, entry in self._entries.items() if entry.deadline <= now]
        )

    def _drop_all(self, keys: list[tuple[str, str]]) -> int:
        for key in keys:
            self._drop(key)
        return len(keys)

    def _drop(self, key: tuple[str, str]) -> _StoredTurn | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.size
        return entry
