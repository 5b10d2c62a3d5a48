"""Keep-alive connections to instances: the one that was used last is used first, so that those too many grow old and are closed."""

import ssl
from dataclasses import dataclass, field

from kvferry.router.http1.upstream_connection import UpstreamConnection
from kvferry.types import Address

__all__ = ["Target", "TargetPool"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where an instance listens. `tls`: how to check that it is the one."""

    address: Address
    tls: ssl.SSLContext | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.address, self.tls)))

    def __hash__(self) -> int:
        return self._hash


class TargetPool:
    """A target and the connections to it that wait for their next request. An idle one's deadline is when it is too old."""

    __slots__ = ("_idle", "host", "num_abandoned", "num_received", "target")

    def __init__(self, target: Target) -> None:
        self.target = target
        self.host = str(target.address)
        self.num_received = 0
        """How often something has come from there."""
        self.num_abandoned = 0
        self._idle: list[UpstreamConnection] = []

    def take(self, now: float) -> UpstreamConnection | None:
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.deadline > now and connection.is_clean:
                return connection
            connection.abort()
        return None

    def put(self, connection: UpstreamConnection) -> None:
        self._idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """It is lost, whether it was idle or not."""
        if connection in self._idle:
            self._idle.remove(connection)
