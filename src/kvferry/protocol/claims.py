"""Readers with a genuine ticket whose lease has yet to be granted here. Plain data; pure."""

from dataclasses import dataclass, field

from kvferry.protocol.messages import Attach, Confirm, Detach
from kvferry.types import Route

__all__ = ["PendingReaders"]


@dataclass(slots=True)
class PendingReaders:
    """Readers that came before the grant."""

    serial: int
    """Of their ticket. A prefill that is preempted has another lease before it, perhaps."""
    readers: dict[str, tuple[Route, Attach]] = field(default_factory=dict)
    """Reader -> what it said, and where it is answered."""
    ends: dict[str, Confirm | Detach] = field(default_factory=dict)
    """Of readers that are through already."""
    is_abandoned: bool = False
