"""How each request's receive went: what the ferry timed, with what its planes carried for it. Runs on the worker's main thread."""

from dataclasses import dataclass, field, replace

from kvferry.connectors.contract import KVConnectorTransferResults
from kvferry.events import BytesMoved, PullTimes
from kvferry.types import RequestId

__all__ = ["Carried"]


@dataclass(slots=True)
class Carried:
    """Of receives under way: bytes, pieces and the plane. What is over is forgotten."""

    _moved: dict[RequestId, tuple[int, int, str]] = field(default_factory=dict, init=False)

    def note(self, event: BytesMoved) -> None:
        if event.request is not None and event.is_ok:
            total_bytes, pieces, _ = self._moved.get(event.request, (0, 0, ""))
            self._moved[event.request] = total_bytes + event.total_bytes, pieces + event.pieces, event.plane

    def tell(self, request: RequestId, times: PullTimes | None, results: KVConnectorTransferResults) -> None:
        """Its receive has ended."""
        total_bytes, pieces, plane = self._moved.pop(request, (0, 0, ""))
        if times is not None:
            results.recving_times[request] = [replace(times, total_bytes=total_bytes, pieces=pieces, plane=plane)]
