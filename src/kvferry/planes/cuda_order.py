"""The order of an engine that computes on a CUDA device: events of the stream it uses."""

from dataclasses import dataclass

import torch

from kvferry.ports.order import Mark

__all__ = ["CudaOrder"]


@dataclass(frozen=True, slots=True)
class _EventMark:
    event: torch.cuda.Event

    def has_passed(self) -> bool:
        return bool(self.event.query())


class CudaOrder:
    """Implements `ports.order.EngineOrder`."""

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)

    def mark(self) -> Mark | None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _EventMark(event)
