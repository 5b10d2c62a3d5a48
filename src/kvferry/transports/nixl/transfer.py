"""One transfer over NIXL: what is still to be posted, what is under way, what has been moved.

Owned by the thread of its transport. Knows nothing of NIXL but what `Agent` says.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvferry.errors import TransportError
from kvferry.transports.base import Completion, Handle
from kvferry.transports.copy.segments import Descriptors
from kvferry.types import PeerId, Region

__all__ = ["Agent", "NixlLink", "NixlTransfer", "Posted", "Telemetry", "UncertainFailure"]

MAX_POSTED = 4
"""Batches of one transfer under way at once."""


class Posted(NamedTuple):
    """One batch under way."""

    handle: Any
    """NIXL's."""
    descriptors: int


class UncertainFailure(TransportError):
    """A batch has failed, and some of it may still be written."""


class Agent(Protocol):
    """What a transfer needs of a NIXL agent. Posting and asking raise TransportError when the peer
    or the transport has failed.
    """

    @property
    def is_gone(self) -> bool: ...
    def post(self, operation: str, batch: Descriptors, link: "NixlLink") -> Posted: ...
    def is_done(self, posted: Posted, link: "NixlLink") -> bool: ...
    def last_completed_at(self, link: "NixlLink") -> float:
        """When something from this peer last came to its end."""

    def telemetry(self, posted: Posted) -> "Telemetry": ...
    def release(self, posted: Posted) -> None:
        """Forget a batch. One that is under way is not stopped by that."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Of one batch, on NIXL's clock."""

    started_us: int
    ended_us: int
    post_us: int
    total_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True, eq=False)
class NixlLink:
    """One connection to a peer's agent."""

    peer: PeerId
    agent: str
    metadata: bytes
    regions: tuple[Region, ...]


@dataclass(slots=True, eq=False)
class NixlTransfer:
    """A read or write: batches not yet posted, batches under way, and what has been moved. All of
    it goes through one agent.
    """

    handle: Handle
    link: NixlLink
    agent: Agent
    operation: str
    batches: Iterator[Descriptors]
    upcoming: Descriptors | None = None
    """The batch after the last one posted: with the last one it is known that it was the last."""
    posted: list[Posted] = field(default_factory=list)
    error: str | None = None
    stopped_at: float | None = None
    is_exhausted: bool = False
    may_still_write: bool = False
    """Something of it may be under way that nobody hears of any more: it ends with its agent."""
    collected: list[Telemetry] = field(default_factory=list)

    @property
    def can_post(self) -> bool:
        return not self.is_exhausted and len(self.posted) < MAX_POSTED

    @property
    def has_ended(self) -> bool:
        return (
            self.is_exhausted
            and not self.posted
            and (not self.may_still_write or self.agent.is_gone)
        )

    def post(self) -> None:
        batch = self.upcoming or next(self.batches, None)
        if batch is not None:
            try:
                self.posted.append(self.agent.post(self.operation, batch, self.link))
            except UncertainFailure:
                self.may_still_write = True
                raise
            self.upcoming = next(self.batches, None)
        self.is_exhausted = self.upcoming is None

    def stop(self, why: str, at: float) -> None:
        """Post nothing more. The first reason counts."""
        if self.error is None:
            self.error, self.stopped_at = why, at
        self.is_exhausted = True

    def collect(self) -> None:
        """Take note of batches that have ended. TransportError when one has failed."""
        for posted in list(self.posted):
            try:
                if not self.agent.is_done(posted, self.link):
                    continue
                self.collected.append(self.agent.telemetry(posted))
            except TransportError as error:
                self.may_still_write |= isinstance(error, UncertainFailure)
                self._forget(posted)
                raise
            self._forget(posted)

    def must_close_agent(self, now: float, timeout_s: float) -> bool:
        """It was stopped, and waiting longer for what is under way would be in vain."""
        if self.stopped_at is None or self.has_ended:
            return False
        return (
            self.may_still_write
            or now > max(self.stopped_at, self.agent.last_completed_at(self.link)) + timeout_s
        )

    def abandon(self) -> None:
        """Let go of what is under way, so that the agent can end, and the transfer with it."""
        self.may_still_write |= bool(self.posted)
        for posted in self.posted:
            self.agent.release(posted)
        self.posted.clear()

    def completion(self) -> Completion:
        parts = self.collected
        elapsed_us = max((p.ended_us for p in parts), default=0) - min(
            (p.started_us for p in parts), default=0
        )
        return Completion(
            self.handle,
            self.error,
            total_bytes=sum(part.total_bytes for part in parts),
            segments=sum(part.descriptors for part in parts),
            post_s=sum(part.post_us for part in parts) / 1e6,
            transfer_s=elapsed_us / 1e6,
        )

    def _forget(self, posted: Posted) -> None:
        self.posted.remove(posted)
        self.agent.release(posted)
