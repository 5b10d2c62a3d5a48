"""Sends and receives messages of bounce-buffer transfers as NIXL notifications.

An agent that asks us for a slot may be unknown here. Replies to it go over a connection made from
the metadata in its request. Owned by the thread of the transport.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError, TransportError
from kvferry.transports.nixl.bounce.messages import BounceMessage, Envelope, NotificationCodec
from kvferry.transports.nixl.transport import NixlOffer, NixlTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

MAX_ROUTES = 256
"""Most agents that are remembered; requests of further agents cannot be answered."""
IDLE_S = 60.0
"""How long an unused route is kept."""
RETRY_S = 1.0
"""How long after a failure a route is not tried again."""
CLEANUP_INTERVAL_S = 1.0


@dataclass(slots=True)
class _Route:
    """How to reach an agent that has asked us for a slot."""

    peer: PeerId
    metadata: bytes
    used_at: float
    retry_at: float = 0.0


class Mailbox:
    """The notifications of one transport."""

    def __init__(self, plain: NixlTransport, key: bytes, region: Region) -> None:
        """`region`: a valid region, which a connection requires; nothing is posted over routes."""
        self._plain = plain
        self._codec = NotificationCodec(key, plain.identity().agent)
        self._region = region
        self._routes: dict[str, _Route] = {}
        self._cleaned_at = 0.0
        self.num_dropped = 0
        """Number of notifications that could not be verified or decoded."""

    def receive(self) -> Iterator[Envelope]:
        for note in self._plain.take_notes():
            try:
                envelope = self._codec.decode(note)
            except RemoteProtocolError:
                self.num_dropped += 1
            else:
                yield envelope

    def learn(self, agent: str, metadata: bytes, now: float) -> None:
        """Store the metadata of an agent, or mark the route as used if `metadata` is empty."""
        route = self._routes.get(agent)
        if route is not None:
            route.metadata, route.used_at = metadata or route.metadata, now
        elif metadata and len(self._routes) < MAX_ROUTES:
            peer = PeerId(EngineId(f"agent {agent}"), Epoch(agent), 0)
            self._routes[agent] = _Route(peer, metadata, now)

    def send(self, agent: str, messages: Sequence[BounceMessage], now: float) -> None:
        """Send messages to an agent. TransportError if the agent cannot be reached."""
        route, peer = self._routes.get(agent), self._plain.connected_to(agent)
        if peer is None and (route is None or now < route.retry_at):
            raise TransportError(f"there is no route to agent {agent}")
        try:
            if route is not None:
                route.used_at = now
                if peer is None:
                    peer, own = route.peer, NixlOffer(agent, route.metadata)
                    self._plain.connect_agent(peer, own, [self._region])
            assert peer is not None
            for note in self._codec.encode(agent, messages):
                self._plain.notify(peer, note)
        except TransportError:
            if route is not None:
                route.retry_at = now + RETRY_S
            raise

    def forget_idle(self, now: float, busy: Collection[str]) -> None:
        """Close the routes to agents that are not `busy`, some time after their last use."""
        if now <= self._cleaned_at + CLEANUP_INTERVAL_S:
            return
        self._cleaned_at = now
        for agent, route in list(self._routes.items()):
            if agent not in busy and now > route.used_at + IDLE_S:
                self._plain.disconnect(route.peer)
                del self._routes[agent]
