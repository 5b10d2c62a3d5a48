"""The agents that our own transfers are posted on: the one in use, and earlier ones that are being given up.

    in use ──── a stopped transfer waits in vain ────▶ retired ──── only such transfers are left ────▶ closed, gone

A stopped transfer whose peer is silent ends with its agent only: before that the peer may still answer, and NIXL would write. So its
agent is retired: nothing new begins on it, what others have begun goes on to its end, and then it is closed. Others meet a new agent.
Owned by the thread of the transport.
"""

import time
from collections.abc import Callable, Iterable

from kvferry.errors import TransportError
from kvferry.planes.nixl_agent import NixlAgent
from kvferry.planes.nixl_transfer import Agent, NixlLink, NixlTransfer

__all__ = ["AgentPool"]

MAX_RETIRED = 3
"""Each has about 17 files and two threads. The number comes down by itself: nothing is added to a retired agent, and what is under way on
it ends, or is stopped by its deadline and then waits in vain too. Until then whatever else waits in vain waits on, on the agent in use."""


class AgentPool:
    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._in_use: NixlAgent | None = None
        self._retired: list[NixlAgent] = []
        self._leaving: set[str] = set()
        """Agents of peers that the one in use shall forget, once nothing is posted to them."""

    @property
    def is_settled(self) -> bool:
        return not self._retired and not self._leaving

    def is_in_use(self, agent: Agent) -> bool:
        return agent is self._in_use

    def connected(self) -> list[NixlAgent]:
        """Those on which something may move."""
        return [agent for agent in (self._in_use, *self._retired) if agent is not None and agent.remotes]

    def reach(self, link: NixlLink, transfers: Iterable[NixlTransfer], open_agent: Callable[[], NixlAgent]) -> NixlAgent:
        """The agent in use, opened if there is none, and connected. TransportError when the peer cannot be reached."""
        if self._in_use is None:
            self._in_use = open_agent()
        self._forget_leaving(transfers)
        if link.agent in self._leaving:
            # A connection that has failed is got rid of by forgetting its agent only.
            raise TransportError(f"an earlier connection to {link.peer} is still being closed; try again in a moment")
        if link.agent not in self._in_use.remotes:
            self._in_use.add(link.agent, link.metadata, link.peer)
        return self._in_use

    def leave(self, name: str) -> None:
        """Forget a peer's agent, as soon as nothing is posted to it."""
        if self._in_use is not None and name in self._in_use.remotes:
            self._leaving.add(name)

    def needs_agent_close(self, transfer: NixlTransfer) -> bool:
        return transfer.must_close_agent(time.monotonic(), self._timeout_s)

    def advance(self, transfers: Iterable[NixlTransfer]) -> None:
        """Retire, close and forget what can be. What waited in vain has ended when its agent is gone."""
        lost = {transfer.agent for transfer in transfers if self.needs_agent_close(transfer)}
        if self._in_use in lost and len(self._retired) < MAX_RETIRED:
            self._retire()
        for agent in self._retired:
            remaining = [transfer for transfer in transfers if transfer.agent is agent and not transfer.has_ended]
            if all(self.needs_agent_close(transfer) for transfer in remaining):
                _end(agent, remaining)
        self._retired = [agent for agent in self._retired if not agent.is_gone]
        self._forget_leaving(transfers)

    def close(self, transfers: Iterable[NixlTransfer]) -> None:
        if self._in_use is not None:
            self._retire()
        for agent in self._retired:
            _end(agent, transfers)
        self._retired.clear()

    def _retire(self) -> None:
        assert self._in_use is not None
        self._retired.append(self._in_use)
        self._in_use = None
        self._leaving.clear()

    def _forget_leaving(self, transfers: Iterable[NixlTransfer]) -> None:
        if self._in_use is None or not self._leaving:
            return
        busy = {transfer.link.agent for transfer in transfers if transfer.agent is self._in_use and not transfer.has_ended}
        for name in self._leaving - busy:
            self._leaving.discard(name)
            self._in_use.remove(name)


def _end(agent: NixlAgent, transfers: Iterable[NixlTransfer]) -> None:
    for transfer in transfers:
        if transfer.agent is agent:
            transfer.abandon()
    agent.close()
