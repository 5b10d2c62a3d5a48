"""How agents are answered that have asked us for something: by links made from what they told. Owned by the thread of the transport."""

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.errors import TransportError
from kvferry.planes.nixl import NixlTransport
from kvferry.types import EngineId, Epoch, PeerId, Region

__all__ = ["ReplyRoutes"]

MAX_ROUTES = 256
IDLE_S = 60.0
RETRY_S = 1.0


@dataclass(slots=True)
class _Route:
    peer: PeerId
    metadata: bytes
    used_at: float
    retry_at: float = 0.0


class ReplyRoutes:
    def __init__(self, plain: NixlTransport, region: Region) -> None:
        self._plain = plain
        self._region = region
        """Some region: nothing is posted to these agents."""
        self._routes: dict[str, _Route] = {}

    def learn(self, agent: str, metadata: bytes, now: float) -> None:
        """An agent has told how it is reached, or asks again without telling."""
        route = self._routes.get(agent)
        if route is None and metadata and len(self._routes) < MAX_ROUTES:
            self._routes[agent] = _Route(PeerId(EngineId(f"the asking agent {agent}"), Epoch(agent), 0), metadata, now)
        elif route is not None:
            route.metadata, route.used_at = metadata or route.metadata, now

    def send(self, agent: str, note: bytes, now: float) -> None:
        """TransportError when it cannot be reached."""
        route = self._routes.get(agent)
        if route is None or now < route.retry_at:
            raise TransportError(f"there is no way to answer {agent}")
        route.used_at = now
        try:
            if not self._plain.is_connected(route.peer):
                self._plain.connect_agent(route.peer, agent, route.metadata, [self._region])
            self._plain.notify(route.peer, note)
        except TransportError:
            route.retry_at = now + RETRY_S
            raise

    def forget_idle(self, now: float, busy: Collection[str]) -> None:
        for agent, route in list(self._routes.items()):
            if agent not in busy and now > route.used_at + IDLE_S:
                self._plain.disconnect(route.peer)
                del self._routes[agent]
