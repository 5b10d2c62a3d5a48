"""The base of transports whose own thread copies between mapped caches: `shm` and `memory`.

Transfers are cut into slices and served round robin, one slice each, so that a long transfer does
not delay a short one.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.errors import TransportError
from kvferry.transports.base import Operation, Segments
from kvferry.transports.copy.gather import (
    SLICE_BYTES,
    SLICE_COST,
    Copier,
    copy_in_slices,
    fastest_copier,
)
from kvferry.transports.copy.segments import Bytes
from kvferry.transports.linked import LinkedTransfer, LinkedTransport, LinkT

Slices = Iterator[tuple[int, int]]
"""Copies one slice at each step; yields the bytes of the slice and its number of copies."""


@dataclass(slots=True, eq=False)
class CopyTransfer(LinkedTransfer[LinkT]):
    """One read or write. `slices` holds the only references to the peer's memory, so that the
    memory can be unmapped once `slices` is dropped.
    """

    slices: Slices | None = None
    """None: the transfer has ended."""


class CopyingTransport(LinkedTransport[LinkT, CopyTransfer[LinkT]]):
    """A transport completes it with `_views_of`, and `_admitted` if a peer may refuse writes."""

    active_interval_s = 0.0

    def __init__(self, copier: Copier | None = None) -> None:
        super().__init__()
        self._copier = copier or fastest_copier()
        self._views: list[Bytes] = []
        """Of our regions."""

    @abstractmethod
    def _views_of(self, link: LinkT, operation: Operation) -> Sequence[Bytes]:
        """Views of the peer's regions, writable for writes."""

    def _admitted(
        self, slices: Slices, link: LinkT, segments: Sequence[Segments], grant_id: int
    ) -> Slices:
        """The slices of a write, checked by the peer before each is copied. A TransportError fails
        the write.
        """
        return slices

    def _post(
        self, link: LinkT, segments: Sequence[Segments], operation: Operation, grant_id: int
    ) -> CopyTransfer[LinkT]:
        transfer = CopyTransfer(self._next_handle(), link, operation, grant_id)
        remote = self._views_of(link, operation)
        if operation is Operation.READ:
            swapped = [part.swapped() for part in segments]
            transfer.slices = copy_in_slices(swapped, remote, self._views, self._copier)
        else:
            written = copy_in_slices(segments, self._views, remote, self._copier)
            transfer.slices = self._admitted(written, link, segments, grant_id)
        transfer.post_s = time.perf_counter() - transfer.started
        return transfer

    def _progress(self) -> None:
        """Copy about one slice of the next transfer; if its regions are small, several slices.

        The peer is checked before the copy and again after it, so that the memory of a dead peer
        never counts as good.
        """
        transfer = self._next_in_turn(lambda each: each.slices is not None)
        if transfer is None or not self._is_usable(transfer.link) or transfer.slices is None:
            return
        cost = 0
        try:
            while cost < SLICE_BYTES and (moved := next(transfer.slices, None)) is not None:
                transfer.total_bytes += moved[0]
                transfer.segments += moved[1]
                cost += moved[0] + SLICE_COST
        except TransportError as refusal:
            transfer.keeps_link = True
            self._stop(transfer, str(refusal))
            return
        if self._is_usable(transfer.link) and cost < SLICE_BYTES:
            self._end(transfer)

    def _stop(self, transfer: CopyTransfer[LinkT], why: str) -> None:
        transfer.stop(why)
        self._end(transfer)

    def _close(self) -> None:
        self._views = []

    def _end(self, transfer: CopyTransfer[LinkT]) -> None:
        if transfer.slices is not None:
            transfer.slices = None
            self._ended.append(transfer.completion())
