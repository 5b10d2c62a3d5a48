"""How each request's receive went: what the transfer worker timed, with what its transports carried for it. Runs on the worker's main
thread.
"""

from dataclasses import dataclass, field, replace

from kvferry.connectors.contract import KVConnectorTransferResults
from kvferry.events import BytesMoved, TransferTimes
from kvferry.types import RequestId

__all__ = ["ReceiveTotals"]


@dataclass(slots=True)
class ReceiveTotals:
    """Of receives under way: bytes, segments and the transport. What is over is forgotten."""

    _moved: dict[RequestId, tuple[int, int, str]] = field(default_factory=dict, init=False)

    def note(self, event: BytesMoved) -> None:
        if event.request is not None and event.is_ok:
            total_bytes, segments, _ = self._moved.get(event.request, (0, 0, ""))
            self._moved[event.request] = total_bytes + event.total_bytes, segments + event.segments, event.transport

    def report(self, request: RequestId, times: TransferTimes | None, results: KVConnectorTransferResults) -> None:
        """Its receive has ended."""
        total_bytes, segments, transport = self._moved.pop(request, (0, 0, ""))
        if times is not None:
            results.recving_times[request] = [replace(times, total_bytes=total_bytes, segments=segments, transport=transport)]
