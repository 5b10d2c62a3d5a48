"""Warm connections to instances: the one that was used last is used first, so that those too many grow old and are closed."""

import ssl
from dataclasses import dataclass

from kvferry.router.http1.upstream_connection import UpstreamConnection
from kvferry.types import Address

__all__ = ["Pool", "Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where an instance listens. `tls`: how to check that it is the one."""

    address: Address
    tls: ssl.SSLContext | None = None


class Pool:
    """Connections that wait for their next request. An idle one's deadline is when it is too old."""

    __slots__ = ("_idle", "_targets")

    def __init__(self) -> None:
        self._idle: dict[Target, list[UpstreamConnection]] = {}
        self._targets: dict[UpstreamConnection, Target] = {}

    def take(self, target: Target, now: float) -> UpstreamConnection | None:
        idle = self._idle.get(target)
        while idle:
            connection = idle.pop()
            del self._targets[connection]
            if connection.deadline > now and connection.is_clean:
                return connection
            connection.abort()
        return None

    def put(self, target: Target, connection: UpstreamConnection) -> None:
        self._idle.setdefault(target, []).append(connection)
        self._targets[connection] = target

    def forget(self, connection: UpstreamConnection) -> None:
        target = self._targets.pop(connection, None)
        if target is not None:
            idle = self._idle[target]
            idle.remove(connection)
            if not idle:
                del self._idle[target]
