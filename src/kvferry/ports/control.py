"""The control transport: small messages between transfer workers, and to a side channel.

Contract:

- One thread owns a transport and makes every call but `wake`, which any thread may make.
- `send` dials on first use and never waits: frames queue until the other side is there, up to a bound, then TransportError.
- Frames between two sides arrive whole, in order, at most once. None is larger than `MAX_FRAME_BYTES` (longer ones are dropped and
  counted).
- Frames from anybody without the cluster's keys never arrive.
- `poll` waits at most `timeout_s` or until `wake`, and returns what has arrived. Nothing a peer sends makes it raise.
- A dialled peer that goes away is reported once as `Disconnected`; the connection is dropped with it (the next `send` dials again).
"""

from dataclasses import dataclass
from typing import Protocol

from kvferry.types import Route

__all__ = ["MAX_FRAME_BYTES", "ControlEvent", "ControlTransport", "Disconnected", "Received", "Route"]

MAX_FRAME_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Received:
    route: Route
    frame: bytes


@dataclass(frozen=True, slots=True)
class Disconnected:
    address: str


ControlEvent = Received | Disconnected


class ControlTransport(Protocol):
    @property
    def address(self) -> str:
        """What peers dial: `tcp://host:port`, never a wildcard."""

    def send(self, address: str, frame: bytes) -> None: ...

    def reply(self, route: Route, frame: bytes) -> None:
        """Answer on the connection a frame came from. A route that is gone is ignored."""

    def poll(self, timeout_s: float | None) -> list[ControlEvent]: ...

    def wake(self) -> None: ...

    def forget(self, address: str) -> None:
        """Close the connection we dialled to an address, silently. Unknown addresses are ignored."""

    def close(self) -> None: ...
