"""Where each conversation left its cache: D's ticket of the last turn, until it is used, runs out,
or is pushed out by newer ones.

A conversation is known by tenant and name, so that nobody finds another tenant's. A ticket is used
once: `take` removes it, since the turn that takes it brings the next one. It dies with the engine
that issued it; P, which only has to be told, may come and go. Pure: the caller passes `now` (local
monotonic seconds). One thread.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import Instance

__all__ = ["Conversations", "LastTurn"]

_ENTRY_BYTES = 512
"""About what an entry takes besides its texts."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    params: bytes
    """D's `kv_transfer_params` as it wrote them."""
    decoder: Instance
    prefiller: Instance | None = None


@dataclass(slots=True)
class _StoredTurn:
    turn: LastTurn
    deadline: float
    size: int


@dataclass(slots=True)
class Conversations:
    """The least recently written go first when there are too many, or too many bytes of them."""

    max_count: int = 10_000
    max_bytes: int = 64 * 1024 * 1024
    margin_s: float = 2.0
    """A ticket is not used in its last moments: the next turn's request takes time to reach P, and
    P to reach D.
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
        """Replaces what there was. `ttl_s`: how long D said it would keep the blocks. False when it
        is not worth keeping, or too large.
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
        """The last turn's ticket, once."""
        entry = self._drop((tenant, conversation))
        return entry.turn if entry is not None and now < entry.deadline else None

    def forget(self, decoder: Instance) -> int:
        """It was removed or has restarted: its tickets are void. Looks at every entry, as it
        happens rarely.
        """
        seen = {id(entry.turn.decoder): entry.turn.decoder for entry in self._entries.values()}
        same = {
            number for number, other in seen.items() if other == decoder
        }  # few are compared, and comparing is what takes time
        return self._drop_all(
            [key for key, entry in self._entries.items() if id(entry.turn.decoder) in same]
        )

    def expire(self, now: float) -> int:
        """Makes room early; correctness does not need it. Looks at every entry, so once in many
        seconds is enough.
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
