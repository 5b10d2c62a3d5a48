"""Write leases: how long a producer may write into a consumer's blocks, counted so that no clock is compared. Pure.

The producer asks when it has something to write, the consumer answers with a duration. The producer counts from before it asked, the
consumer from after it answered, so whatever the message took, the producer's lease is over first:

    producer   asked ─────────────────── until ── margin ──|            no byte is posted after `until`
    consumer            answered ──────────────────────────── until     blocks may come back after `until`, once the plane is fenced

The margin covers clocks of different speed and what is posted in the last moment. While nothing was asked, nothing is lent: blocks of a
request that ends are the consumer's own at once.
"""

from dataclasses import dataclass, field

from kvferry.errors import LocalProtocolError

__all__ = ["GivenLeases", "HeldLease", "margin_s"]

MARGIN = 0.1
LEAST_MARGIN_S = 0.05


def margin_s(duration_s: float) -> float:
    """A tenth of the lease: far more than clocks drift apart in that time."""
    return max(LEAST_MARGIN_S, duration_s * MARGIN)


@dataclass(slots=True)
class HeldLease:
    """A producer's licence to write. Every question has a number, so that a late answer extends only from when that one was asked."""

    _asked: dict[int, float] = field(default_factory=dict, init=False)
    _number: int = field(default=0, init=False)
    _until: float = field(default=float("-inf"), init=False)
    _is_revoked: bool = field(default=False, init=False)

    def ask(self, now: float) -> int:
        """The number of a question that is sent now."""
        self._number += 1
        self._asked[self._number] = now
        return self._number

    def answer(self, number: int, duration_s: float) -> bool:
        """The consumer has lent its blocks. False: nothing was asked under this number, or they have been revoked."""
        asked = self._asked.pop(number, None)
        if asked is None or self._is_revoked:
            return False
        self._until = max(self._until, asked + duration_s - margin_s(duration_s))
        return True

    def revoke(self) -> None:
        """For good: no answer that is still on its way brings it back."""
        self._is_revoked = True
        self._asked.clear()

    def has_time(self, needed_s: float, now: float) -> bool:
        """Whether a write that takes so long, begun now, ends within the lease."""
        return not self._is_revoked and now + needed_s <= self._until

    @property
    def until(self) -> float:
        """When everything that was posted must have been cancelled, if it has not ended."""
        return self._until


@dataclass(slots=True)
class GivenLeases:
    """What a consumer has lent of one request's blocks, by rank of the producer."""

    duration_s: float
    _until: dict[int, float] = field(default_factory=dict, init=False)
    _is_closed: bool = field(default=False, init=False)

    def give(self, rank: int, now: float) -> None:
        if self._is_closed:
            raise LocalProtocolError("blocks that are being taken back are not lent again")
        self._until[rank] = max(self._until.get(rank, now), now + self.duration_s)

    def take_back(self) -> list[int]:
        """Lend no more. The ranks that must be told to stop."""
        self._is_closed = True
        return sorted(self._until)

    def returned(self, rank: int) -> None:
        """A rank has written all, or says that it has stopped. Unknown ones are ignored."""
        self._until.pop(rank, None)

    @property
    def is_out(self) -> bool:
        """Whether anybody may still write."""
        return bool(self._until)

    def have_run_out(self, now: float) -> bool:
        """Whether nobody posts a write any more. What was posted may still land: that is the plane's to rule out."""
        return all(until <= now for until in self._until.values())

    def next_deadline(self) -> float | None:
        return max(self._until.values(), default=None)
