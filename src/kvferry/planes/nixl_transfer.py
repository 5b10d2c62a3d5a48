"""One transfer over NIXL: what is still to be posted, what is under way, what has been moved.

Owned by the thread of its plane. Knows nothing of NIXL but what `Agent` says.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.errors import TransportError
from kvferry.planes.runs import Runs
from kvferry.ports.data import Completion, Handle
from kvferry.types import PeerId, Region

__all__ = ["Agent", "Link", "NixlTransfer", "Posted", "Telemetry"]

MAX_POSTED = 4
"""Batches of one transfer under way at once."""
CANCEL_PATIENCE_S = 10.0
"""How long a stopped transfer waits for what is posted, before that is torn down under way."""

Posted = Any
"""NIXL's handle of one batch."""


class Agent(Protocol):
    """What a transfer needs of a NIXL agent. All but `release` raise TransportError when the peer or the transport has failed."""

    def post(self, operation: str, batch: Runs, link: "Link") -> Posted: ...
    def is_done(self, posted: Posted, link: "Link") -> bool: ...
    def telemetry(self, posted: Posted) -> "Telemetry": ...
    def release(self, posted: Posted) -> bool:
        """False when it is under way and cannot be torn down yet."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Of one batch, on NIXL's clock."""

    started_us: int
    ended_us: int
    post_us: int
    total_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One connection to a peer's agent."""

    peer: PeerId
    agent: str
    regions: tuple[Region, ...]


@dataclass(slots=True, eq=False)
class NixlTransfer:
    """A read or write: batches not yet posted, batches under way, and what has been moved."""

    handle: Handle
    link: Link
    operation: str
    batches: Iterator[Runs]
    upcoming: Runs | None = None
    """The batch after the last one posted: with the last one it is known that it was the last."""
    posted: list[Any] = field(default_factory=list)
    error: str | None = None
    is_exhausted: bool = False
    stopped_at: float | None = None
    collected: list[Telemetry] = field(default_factory=list)

    @property
    def can_post(self) -> bool:
        return not self.is_exhausted and len(self.posted) < MAX_POSTED

    @property
    def has_ended(self) -> bool:
        return self.is_exhausted and not self.posted

    def post(self, agent: Agent) -> None:
        batch = self.upcoming or next(self.batches, None)
        if batch is not None:
            self.posted.append(agent.post(self.operation, batch, self.link))
            self.upcoming = next(self.batches, None)
        self.is_exhausted = self.upcoming is None

    def stop(self, why: str) -> None:
        """Post nothing more. The first reason counts."""
        if self.error is None:
            self.error, self.stopped_at = why, time.monotonic()
        self.is_exhausted = True

    def collect(self, agent: Agent) -> None:
        """Take note of batches that have ended. TransportError when one has failed."""
        for posted in list(self.posted):
            try:
                if not agent.is_done(posted, self.link):
                    continue
                self.collected.append(agent.telemetry(posted))
            except TransportError:
                self._forget(agent, posted)
                raise
            self._forget(agent, posted)

    def is_overdue(self, now: float) -> bool:
        return bool(self.posted) and self.stopped_at is not None and now > self.stopped_at + CANCEL_PATIENCE_S

    def abandon(self, agent: Agent) -> None:
        """Tear down what is under way. What cannot be stays posted, to be tried again."""
        self.posted = [posted for posted in self.posted if not agent.release(posted)]

    def completion(self) -> Completion:
        parts = self.collected
        elapsed_us = max((p.ended_us for p in parts), default=0) - min((p.started_us for p in parts), default=0)
        return Completion(
            self.handle,
            self.error,
            total_bytes=sum(part.total_bytes for part in parts),
            pieces=sum(part.descriptors for part in parts),
            post_s=sum(part.post_us for part in parts) / 1e6,
            transfer_s=elapsed_us / 1e6,
        )

    def _forget(self, agent: Agent, posted: Posted) -> None:
        self.posted.remove(posted)
        agent.release(posted)
