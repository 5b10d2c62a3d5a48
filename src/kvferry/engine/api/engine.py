"""What the front-end needs of an engine core; `kvferry.engine.client.EngineClient` is one."""

from collections.abc import Sequence
from typing import Protocol

from kvferry.engine.link import OutputStream
from kvferry.engine.messages import AddRequest, CoreReady, CoreStatus, Remaining
from kvferry.web.handover_records import TransferRecord

__all__ = ["Engine"]


class Engine(Protocol):
    @property
    def ready(self) -> CoreReady: ...

    @property
    def is_alive(self) -> bool: ...

    async def died(self) -> str:
        """Wait until the core is gone; the reason."""

    def add(self, requests: Sequence[AddRequest]) -> list[OutputStream]:
        """All requests enter before the same step. Closing a stream that has not ended aborts its request."""

    def abandon(self, request_id: str) -> None:
        """The answer of this request reached nobody. Harmless for unknown ones."""

    async def status(self, timeout_s: float = 5.0) -> CoreStatus: ...

    async def transfer_records(self, name: str = "", timeout_s: float = 5.0) -> list[TransferRecord]:
        """Of requests of that name whose KV came from a peer; of the newest, without one."""

    def drain(self) -> None:
        """Keep count, from now on, of who still needs the core."""

    @property
    def remaining(self) -> Remaining | None:
        """The count; None before the first."""

    async def drained(self) -> None:
        """Wait until nobody does."""
