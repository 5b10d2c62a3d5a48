"""Transfers over NIXL, and the agents that they are posted on. Owned by the transport's thread."""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kvferry.errors import TransportError
from kvferry.transports.base import Completion
from kvferry.transports.copy.segments import Descriptors
from kvferry.transports.linked import LinkedTransfer
from kvferry.transports.nixl.agent import NixlAgent, NixlLink, UncertainFailure
from kvferry.types import Region

MAX_POSTED = 4
"""Largest number of batches of one transfer in flight."""


@dataclass(slots=True, eq=False)
class NixlTransfer(LinkedTransfer[NixlLink]):
    """A read or write: batches not posted yet, batches in flight, and the bytes moved so far."""

    batches: Iterator[Descriptors] = field(kw_only=True)
    """Computed when they are posted, not when the transfer starts."""
    agent: NixlAgent = field(kw_only=True)
    """The agent on which all batches are posted."""
    keeps_link: bool = True
    """A failure drops the link, with all links to the same agent, as soon as NIXL reports it."""
    upcoming: Descriptors | None = None
    """The batch after the last posted batch.

    Fetched in advance, so that the transfer knows when the last batch has been posted.
    """
    posted: list[Any] = field(default_factory=list)
    """NIXL's handles of the batches in flight."""
    stopped_at: float | None = None
    is_exhausted: bool = False
    may_still_write: bool = False
    """Some bytes may be in flight without a handle; the transfer ends when the agent is gone."""
    began_us: int = 0
    ended_us: int = 0
    """From the first post to the last completion, on NIXL's clock."""

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

    def stop(self, why: str, at: float | None = None) -> None:
        """Post no further batches. Only the first reason is kept."""
        if self.error is None:
            self.error, self.stopped_at = why, time.monotonic() if at is None else at
        self.is_exhausted = True

    def collect(self) -> None:
        """Collect the batches that have completed. TransportError if a batch has failed."""
        for posted in list(self.posted):
            try:
                moved = self.agent.collect(posted, self.link)
            except TransportError as error:
                self.may_still_write |= isinstance(error, UncertainFailure)
                self._forget(posted)
                raise
            if moved is not None:
                self._forget(posted)
                self.total_bytes += moved.total_bytes
                self.segments += moved.descriptors
                self.post_s += moved.post_us / 1e6
                self.began_us = min(self.began_us or moved.started_us, moved.started_us)
                self.ended_us = max(self.ended_us, moved.ended_us)

    def abandon(self) -> None:
        """Release the handles of all batches in flight, so that the agent can be closed.

        The transfer ends when the agent is gone.
        """
        self.may_still_write |= bool(self.posted)
        for posted in self.posted:
            self.agent.release(posted)
        self.posted.clear()

    def completion(self) -> Completion:
        transfer_s = (self.ended_us - self.began_us) / 1e6
        return replace(LinkedTransfer.completion(self), transfer_s=transfer_s)

    def _forget(self, posted: Any) -> None:
        self.posted.remove(posted)
        self.agent.release(posted)


# -- agent pool --
# The agents that our own transfers are posted on: the agent in use, and retired agents.
#
#     in use ── a stopped transfer gets no answer ──▶ retired ── no live transfer left ──▶ closed
#
# A stopped transfer whose peer is silent ends only when the agent is closed: until then the peer
# may still answer, and NIXL would write. So the agent is retired. The transport starts nothing new
# on a retired agent, transfers of live peers on a retired agent run to completion, and then the
# agent is closed. New transfers use a new agent. See
# docs/decisions/022-a-reading-agent-that-can-be-thrown-away.md.


MAX_RETIRED = 3
"""At most this many agents are retired at a time; each has about 17 files and two threads.

The count falls without help: nothing is added to a retired agent, and each remaining transfer ends,
or is stopped by a deadline and then ends with the agent. While this many agents are retired,
stopped transfers of silent peers on the agent in use keep waiting.
"""


class AgentPool:
    """The posting agents of one transport: at most one in use, and up to MAX_RETIRED retired."""

    def __init__(
        self,
        transfers: Collection[NixlTransfer],
        open_agent: Callable[[], NixlAgent],
        timeout_s: float,
    ) -> None:
        """`transfers`: a view of all transfers of the transport."""
        self._transfers = transfers
        self._open_agent = open_agent
        self._timeout_s = timeout_s
        self._in_use: NixlAgent | None = None
        self._retired: list[NixlAgent] = []
        self._leaving: set[str] = set()
        """Names of peers' agents to remove from the agent in use, once no transfer to the peer is
        posted.
        """

    @property
    def is_settled(self) -> bool:
        return not self._retired and not self._leaving

    def is_in_use(self, agent: NixlAgent) -> bool:
        return agent is self._in_use

    def register(self, region: Region) -> bool:
        """Register more memory with the agent in use, if there is one.

        Retired agents start nothing new, and so do not need the memory.
        """
        return self._in_use is None or self._in_use.register([region])

    def update_metadata(self, link: NixlLink) -> None:
        """Load the metadata of `link`, if the agent in use has loaded older metadata."""
        if self._in_use is not None and link.agent in self._in_use.remotes:
            self._in_use.add(link.agent, link.metadata, link.peer)

    def connected(self) -> list[NixlAgent]:
        """Agents with connected peers, where a transfer may need progress."""
        return [
            agent for agent in (self._in_use, *self._retired) if agent is not None and agent.remotes
        ]

    def reach(self, link: NixlLink) -> NixlAgent:
        """Return the agent in use, connected to the peer of `link`; open an agent if there is none.

        TransportError if the peer cannot be reached.
        """
        if self._in_use is None:
            self._in_use = self._open_agent()
        self._forget_leaving()
        if link.agent in self._leaving:
            # Only removing the remote agent gets rid of a failed connection, which must wait until
            # no transfer to the peer is posted.
            raise TransportError(
                f"an earlier connection to {link.peer} is still being closed; try again in a moment"
            )
        if link.agent not in self._in_use.remotes:
            self._in_use.add(link.agent, link.metadata, link.peer)
        return self._in_use

    def leave(self, name: str) -> None:
        """Remove a peer's agent as soon as no transfer to the peer is posted."""
        if self._in_use is not None and name in self._in_use.remotes:
            self._leaving.add(name)

    def needs_agent_close(self, transfer: NixlTransfer) -> bool:
        """Whether a transfer was stopped, and can end only by closing its agent."""
        if transfer.stopped_at is None or transfer.has_ended:
            return False
        answered_at = max(transfer.stopped_at, transfer.agent.last_completed_at(transfer.link))
        return transfer.may_still_write or time.monotonic() > answered_at + self._timeout_s

    def advance(self) -> None:
        """Retire and close agents where possible, and remove the peers' agents that are leaving.

        A stopped transfer of a silent peer has ended when the agent is gone.
        """
        lost = {transfer.agent for transfer in self._transfers if self.needs_agent_close(transfer)}
        if self._in_use in lost and len(self._retired) < MAX_RETIRED:
            self._retire()
        for agent in self._retired:
            remaining = [
                transfer
                for transfer in self._transfers
                if transfer.agent is agent and not transfer.has_ended
            ]
            # Only stopped transfers of silent peers remain, so closing the agent harms no live
            # peer.
            if all(self.needs_agent_close(transfer) for transfer in remaining):
                self._end(agent)
        self._retired = [agent for agent in self._retired if not agent.is_gone]
        self._forget_leaving()

    def close(self) -> None:
        if self._in_use is not None:
            self._retire()
        for agent in self._retired:
            self._end(agent)
        self._retired.clear()

    def _retire(self) -> None:
        assert self._in_use is not None
        self._retired.append(self._in_use)
        self._in_use = None
        self._leaving.clear()

    def _forget_leaving(self) -> None:
        if self._in_use is None or not self._leaving:
            return
        busy = {
            transfer.link.agent
            for transfer in self._transfers
            if transfer.agent is self._in_use and not transfer.has_ended
        }
        for name in self._leaving - busy:
            self._leaving.discard(name)
            self._in_use.remove(name)

    def _end(self, agent: NixlAgent) -> None:
        for transfer in self._transfers:
            if transfer.agent is agent:
                transfer.abandon()
        agent.close()
