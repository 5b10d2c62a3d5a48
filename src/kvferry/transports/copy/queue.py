"""The transfers of a transport that copies by itself: cut into slices, served round robin.

The transport's thread owns the queue. The transport says which peers are alive; the queue does the
rest of the data transport's contract.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.errors import TransportError
from kvferry.transports.base import Completion, Handle, Operation, Segments
from kvferry.transports.copy.gather import (
    SLICE_BYTES,
    SLICE_COST,
    Copier,
    RegionCopy,
    copy_in_slices,
    fastest_copier,
)
from kvferry.transports.copy.segments import Bytes
from kvferry.types import PeerId

Slices = Iterator[tuple[int, int]]
"""Copies one slice at each step; yields the bytes of the slice and its number of copies."""


@dataclass(slots=True, eq=False)
class CopyTransfer:
    """One read or write. `slices` holds the only references to the peer's memory, so that the
    memory can be unmapped once `slices` is dropped.
    """

    handle: Handle
    peer: PeerId
    started: float
    slices: Slices
    post_s: float
    total_bytes: int = 0
    copies: int = 0

    def completion(self, error: str | None) -> Completion:
        return Completion(
            self.handle,
            error,
            self.total_bytes,
            self.copies,
            self.post_s,
            time.perf_counter() - self.started,
        )


@dataclass(slots=True)
class CopyQueue:
    """Serves active transfers round robin, one slice each, so that a long transfer does not delay a
    short one.
    """

    copier: Copier = field(default_factory=fastest_copier)
    _active: deque[CopyTransfer] = field(default_factory=deque)
    _ended: list[Completion] = field(default_factory=list)
    _last_handle: int = 0

    def __len__(self) -> int:
        return len(self._active) + len(self._ended)

    def start(
        self,
        peer: PeerId,
        segments: Sequence[Segments],
        local: Sequence[Bytes],
        remote: Sequence[Bytes],
        operation: Operation,
        admit: Callable[[Slices], Slices] = iter,
    ) -> Handle:
        """Start a transfer. `admit` may wrap the slices, to check each before it is copied: a
        TransportError from `admit` fails the transfer.
        """
        started = time.perf_counter()
        copies = [
            RegionCopy(part, local[part.local_region], remote[part.remote_region], operation)
            for part in segments
        ]
        slices = admit(copy_in_slices(copies, self.copier))
        handle = self._next_handle()
        self._active.append(
            CopyTransfer(handle, peer, started, slices, time.perf_counter() - started)
        )
        return handle

    def end_at_once(self) -> Handle:
        """Return a handle that has ended already; `take_ended` returns its completion."""
        handle = self._next_handle()
        self._ended.append(Completion(handle, None, 0, 0, 0.0, 0.0))
        return handle

    def advance(self, is_alive: Callable[[PeerId], bool]) -> None:
        """Copy about one slice of the first transfer; if its regions are small, several slices.

        `is_alive` is called before the copy and again after it, so that the memory of a dead peer
        never counts as good. `is_alive` calls `fail_peer` for a dead peer.
        """
        if not self._active or not is_alive(self._active[0].peer):
            return
        transfer = self._active[0]
        cost = 0
        try:
            while cost < SLICE_BYTES and (moved := next(transfer.slices, None)) is not None:
                transfer.total_bytes += moved[0]
                transfer.copies += moved[1]
                cost += moved[0] + SLICE_COST
        except TransportError as refusal:
            self._active.popleft()
            self._end(transfer, str(refusal))
            return
        if not is_alive(transfer.peer):
            return
        self._active.popleft()
        if cost < SLICE_BYTES:
            self._end(transfer, None)
        else:
            self._active.append(transfer)

    def take_ended(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, handle: Handle) -> None:
        self._end_where(lambda transfer: transfer.handle == handle, "cancelled")

    def fail_peer(self, peer: PeerId, error: str) -> None:
        self._end_where(lambda transfer: transfer.peer == peer, error)

    def clear(self) -> None:
        self._active.clear()
        self._ended.clear()

    def _next_handle(self) -> Handle:
        self._last_handle += 1
        return Handle(self._last_handle)

    def _end_where(self, matches: Callable[[CopyTransfer], bool], error: str) -> None:
        for transfer in [each for each in self._active if matches(each)]:
            self._active.remove(transfer)
            self._end(transfer, error)

    def _end(self, transfer: CopyTransfer, error: str | None) -> None:
        transfer.slices = iter(())  # drops the references to the peer's memory
        self._ended.append(transfer.completion(error))
