"""The order of an engine that computes on a CUDA device: events of the stream it uses."""

from dataclasses import dataclass

import torch

from kvferry.ports.order import StreamEvent

__all__ = ["CudaOrder"]


@dataclass(frozen=True, slots=True)
class _EventMark:
    event: torch.cuda.Event

    def is_complete(self) -> bool:
        return bool(self.event.query())


class CudaOrder:
    """Implements `ports.order.EngineStream`."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)

    def mark(self) -> StreamEvent | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _EventMark(event)
