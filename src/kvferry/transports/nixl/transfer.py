"""One transfer over NIXL: batches not posted yet, batches in flight, and the bytes moved so far.

Owned by the transport's thread. The module knows NIXL only through the `Agent` protocol.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvferry.errors import TransportError
from kvferry.transports.base import Completion, Handle, Operation
from kvferry.transports.copy.segments import Descriptors
from kvferry.types import PeerId, Region

MAX_POSTED = 4
"""Largest number of batches of one transfer in flight."""


class Posted(NamedTuple):
    """One batch in flight."""

    handle: Any
    """NIXL's handle of the transfer."""
    descriptors: int


class UncertainFailure(TransportError):
    """A batch has failed, and some bytes of the batch may still be written."""


class Agent(Protocol):
    """The operations of a NIXL agent that a transfer needs.

    `post`, `is_done` and `telemetry` raise TransportError if the peer or the transport has failed.
    """

    @property
    def is_gone(self) -> bool: ...
    def post(self, operation: Operation, batch: Descriptors, link: "NixlLink") -> Posted: ...
    def is_done(self, posted: Posted, link: "NixlLink") -> bool: ...
    def last_completed_at(self, link: "NixlLink") -> float:
        """When a batch with this peer last completed, in local monotonic seconds; 0 if none has."""

    def telemetry(self, posted: Posted) -> "Telemetry": ...
    def release(self, posted: Posted) -> None:
        """Release the handle of a batch. The release does not cancel a batch in flight."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Times and sizes of one batch, measured by NIXL on NIXL's clock."""

    started_us: int
    ended_us: int
    post_us: int
    total_bytes: int
    descriptors: int


@dataclass(slots=True, eq=False)
class NixlLink:
    """One connection to a peer's agent."""

    peer: PeerId
    agent: str
    metadata: bytes
    """The newest metadata of the peer's agent that we have."""
    regions: tuple[Region, ...]


@dataclass(slots=True, eq=False)
class NixlTransfer:
    """A read or write. All batches of a transfer are posted on the same agent."""

    handle: Handle
    link: NixlLink
    agent: Agent
    operation: Operation
    batches: Iterator[Descriptors]
    upcoming: Descriptors | None = None
    """The batch after the last posted batch.

    Fetched in advance, so that the transfer knows when the last batch has been posted.
    """
    posted: list[Posted] = field(default_factory=list)
    error: str | None = None
    stopped_at: float | None = None
    is_exhausted: bool = False
    may_still_write: bool = False
    """Some bytes may be in flight without a handle; the transfer ends when the agent is gone."""
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
        """Post no further batches. Only the first reason is kept."""
        if self.error is None:
            self.error, self.stopped_at = why, at
        self.is_exhausted = True

    def collect(self) -> None:
        """Collect the batches that have completed. TransportError if a batch has failed."""
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
        """Whether the transfer was stopped, and can end only by closing the agent."""
        if self.stopped_at is None or self.has_ended:
            return False
        return (
            self.may_still_write
            or now > max(self.stopped_at, self.agent.last_completed_at(self.link)) + timeout_s
        )

    def abandon(self) -> None:
        """Release the handles of all batches in flight, so that the agent can be closed.

        The transfer ends when the agent is gone.
        """
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
