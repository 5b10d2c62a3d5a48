"""When each pull came how far, for whoever wants to see where a request's time went. Decides nothing. Pure."""

from dataclasses import dataclass, field, replace

from kvferry.events import TransferTimes
from kvferry.protocol.transfers import TransferEvent, TransferState
from kvferry.types import RequestId

__all__ = ["TransferTimings"]

_BEGAN = (TransferState.MOVING, TransferState.FILLING)
_MOVED = (TransferState.CONFIRMING, TransferState.RECLAIMING)


@dataclass(slots=True)
class TransferTimings:
    """One per pull that is not over."""

    _times: dict[RequestId, TransferTimes] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._times)

    def start(self, request: RequestId, now: float) -> None:
        self._times[request] = TransferTimes(now)

    def note(self, request: RequestId, event: TransferEvent, state: TransferState, now: float) -> None:
        """It met this and is in that state now. Of what happens again, after a withdrawal, the last time counts; of reading the first."""
        times = self._times.get(request)
        if times is None:
            return
        if event is TransferEvent.PEER_READY:
            times = replace(times, attached_at=now)
        elif event is TransferEvent.BLOCKS_ALLOCATED:
            times = replace(times, allocated_at=now)
        if state in _BEGAN and times.began_at is None:
            times = replace(times, began_at=now)
        elif state in _MOVED and event is TransferEvent.BYTES_MOVED:
            times = replace(times, moved_at=now)
        elif event is TransferEvent.CONFIRMED:
            times = replace(times, confirmed_at=now)
        self._times[request] = times

    def stop(self, request: RequestId) -> TransferTimes | None:
        return self._times.pop(request, None)
