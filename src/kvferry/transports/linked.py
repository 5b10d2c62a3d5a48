"""What every data transport does the same: links, transfers, handles, write grants, closing.

`LinkedTransport` implements `transports.base.DataTransport`. A transport completes it with what is
its own:

    _open(regions)              make our memory reachable; False if this transport cannot carry it
    offer()                     describe this side
    _connect(peer, …)           make the `Link` to a peer
    _post(link, …)              make a transfer and start it
    _progress()                 move bytes for a bounded time, and report the transfers that ended
    _stop(transfer, why)        end a transfer soon; by default only `transfer.stop(why)`
    _disconnect(link, why)      stop the link's transfers and close the link
    _close()                    free everything that `_open` made

A transfer is in `_transfers` from `_post` until `poll` returns its completion. Its end is reported
once, by a completion in `_ended`: by `_progress`, or by a thread of the transport's own, since
`_ended` may be appended to on any thread. The thread that owns the transport makes all other calls.

A transfer that fails takes its link with it, because the peer may have restarted: the next transfer
needs a new handshake. Exceptions are transfers that were cancelled, or that set `keeps_link`.
"""

import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from kvferry.errors import LocalProtocolError, TransportError
from kvferry.transports.base import (
    Completion,
    Handle,
    Operation,
    Segments,
    TransportOffer,
)
from kvferry.transports.copy.segments import (
    Descriptors,
    batches,
    check_regions,
    check_segments,
    descriptors_between,
)
from kvferry.transports.write_grants import (
    WriteGrants,
    check_grant_id,
    write_grants_unsupported,
)
from kvferry.types import PeerId, Region

CANCELLED = "cancelled"
LINK_CHECK_S = 2.0
"""Interval at which the links of peers in other processes of this host are checked: memory of a
dead peer that is mapped here would keep the peer's whole cache allocated.
"""


@dataclass(slots=True, eq=False)
class Link:
    """One peer, as described by one offer. A second `connect` makes another link."""

    peer: PeerId
    regions: tuple[Region, ...]
    is_dropped: bool = field(default=False, init=False)

    def problem(self) -> str | None:
        """Why the peer cannot be reached any more; None as far as this side knows."""
        return None

    def close(self) -> None:
        """Free what is held for the peer. Idempotent."""


LinkT = TypeVar("LinkT", bound=Link)


@dataclass(slots=True, eq=False)
class LinkedTransfer(Generic[LinkT]):
    """One read or write, and what its completion reports."""

    handle: Handle
    link: LinkT
    operation: Operation
    grant_id: int = 0
    started: float = field(default_factory=time.perf_counter)
    post_s: float = 0.0
    total_bytes: int = 0
    segments: int = 0
    error: str | None = None
    keeps_link: bool = False
    """Only this transfer has failed; the peer stays connected."""

    def stop(self, why: str) -> None:
        """Start nothing further. Only the first reason is kept."""
        self.error = self.error or why

    def completion(self) -> Completion:
        return Completion(
            self.handle,
            self.error,
            self.total_bytes,
            self.segments,
            self.post_s,
            time.perf_counter() - self.started,
        )


class Batch(Protocol):
    """Segments that one request moves."""

    def __len__(self) -> int: ...

    @property
    def total_bytes(self) -> int: ...


BatchT = TypeVar("BatchT", bound=Batch)


@dataclass(slots=True, eq=False)
class BatchedTransfer(LinkedTransfer[LinkT], Generic[LinkT, BatchT]):
    """A transfer in batches, each of which is computed when it is taken."""

    batches: Iterator[BatchT] = field(kw_only=True)

    def next_batch(self) -> BatchT | None:
        began = time.perf_counter()
        batch = next(self.batches, None)
        self.post_s += time.perf_counter() - began
        return batch

    def count(self, batch: BatchT) -> None:
        self.total_bytes += batch.total_bytes
        self.segments += len(batch)


TransferT = TypeVar("TransferT", bound=LinkedTransfer[Any])


class LinkedTransport(ABC, Generic[LinkT, TransferT]):
    """Implements `transports.base.DataTransport`, but for the methods in the module's docstring."""

    name: str
    supports_write_grants: bool = False
    active_interval_s: float = 0.001
    """How soon `poll` should be called again while a transfer or a revocation is active."""
    link_check_s: float | None = None
    """How often links without transfers are checked; None: never."""

    def __init__(self) -> None:
        self._regions: tuple[Region, ...] = ()
        self._is_open = False
        self._links: dict[PeerId, LinkT] = {}
        self._next_link_check = 0.0
        self._transfers: OrderedDict[Handle, TransferT] = OrderedDict()
        self._revocations: set[Handle] = set()
        self._ended: deque[Completion] = deque()
        self._last_handle = 0
        self._write_grants = WriteGrants((), self._ended.append)

    # -- what a transport writes --

    @abstractmethod
    def _open(self, regions: tuple[Region, ...]) -> bool: ...

    @abstractmethod
    def offer(self) -> TransportOffer: ...

    @abstractmethod
    def _connect(
        self, peer: PeerId, offer: TransportOffer, regions: tuple[Region, ...]
    ) -> LinkT: ...

    @abstractmethod
    def _post(
        self, link: LinkT, segments: Sequence[Segments], operation: Operation, grant_id: int
    ) -> TransferT:
        """Start a transfer of checked segments, with a handle from `_next_handle`."""

    @abstractmethod
    def _progress(self) -> None: ...

    def _stop(self, transfer: TransferT, why: str) -> None:
        transfer.stop(why)

    def _disconnect(self, link: LinkT, why: str) -> None:
        for transfer in self._transfers.values():
            if transfer.link is link:
                self._stop(transfer, why)
        link.close()

    def _interrupt_writes(self, grant_id: int) -> None:
        """A grant was revoked while peers write under it: refuse these writes. By default they are
        waited for.
        """

    @abstractmethod
    def _close(self) -> None: ...

    # -- the contract --

    def register(self, regions: Sequence[Region]) -> bool:
        kept = tuple(regions)
        write_grants, self._write_grants = self._write_grants, WriteGrants(kept, self._ended.append)
        if not self._open(kept):
            self._write_grants = write_grants
            return False
        self._regions, self._is_open = kept, True
        return True

    def connect(self, peer: PeerId, offer: TransportOffer, regions: Sequence[Region]) -> None:
        self._check_open()
        check_regions(regions, peer)
        link = self._connect(peer, offer, tuple(regions))
        self.disconnect(peer)
        self._links[peer] = link

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is not None:
            self._drop(link, f"peer {peer} was disconnected")

    def read(self, peer: PeerId, segments: Sequence[Segments]) -> Handle:
        return self._start(peer, segments, Operation.READ)

    def write(self, peer: PeerId, segments: Sequence[Segments], grant_id: int = 0) -> Handle:
        check_grant_id(grant_id)
        return self._start(peer, segments, Operation.WRITE, grant_id)

    def grant_writes(self, grant_id: int, blocks: Sequence[Sequence[int]]) -> None:
        self._check_granting()
        self._write_grants.grant(grant_id, blocks)

    def revoke_writes(self, grant_id: int) -> Handle:
        self._check_granting()
        handle = self._next_handle()
        self._revocations.add(handle)
        if not self._write_grants.revoke(grant_id, handle):
            self._interrupt_writes(grant_id)
        return handle

    def poll(self) -> list[Completion]:
        if self._is_open:
            self._check_links()
            self._progress()
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for completion in ended:
            self._revocations.discard(completion.handle)
            transfer = self._transfers.pop(completion.handle, None)
            if (
                transfer is not None
                and completion.error not in (None, CANCELLED)
                and not transfer.keeps_link
            ):
                self._drop(transfer.link, str(completion.error))
        return ended

    def cancel(self, handle: Handle) -> None:
        transfer = self._transfers.get(handle)
        if transfer is not None:
            self._stop(transfer, CANCELLED)

    def poll_interval_s(self) -> float | None:
        if self._ended:
            return 0.0
        if self._transfers or self._revocations:
            return self.active_interval_s
        return self.link_check_s if self._links else None

    def serving_interval_s(self) -> float | None:
        return None

    def close(self) -> None:
        if not self._is_open:
            return
        for link in list(self._links.values()):
            self._drop(link, "the transport was closed")
        self._close()
        self._is_open = False
        self._regions = ()
        self._transfers.clear()
        self._revocations.clear()
        self._ended.clear()

    # -- for the transport --

    def _check_open(self) -> None:
        if not self._is_open:
            raise LocalProtocolError(
                f"the {self.name} transport is used before its memory is registered, or after it "
                "is closed"
            )

    def _next_handle(self) -> Handle:
        self._last_handle += 1
        return Handle(self._last_handle)

    def _is_usable(self, link: LinkT) -> bool:
        """Whether a link is in use and its peer can still be reached; drops the link if not."""
        if link.is_dropped:
            return False
        problem = link.problem()
        if problem is not None:
            self._drop(link, problem)
        return problem is None

    def _drop(self, link: Link, why: str) -> None:
        """Stop using a link, and fail its transfers. Links that are no longer used are ignored."""
        if not link.is_dropped:
            link.is_dropped = True
            self._disconnect(self._links.pop(link.peer), why)

    def _cut(
        self, segments: Sequence[Segments], link: Link, max_bytes: int, max_descriptors: int
    ) -> Iterator[Descriptors]:
        """The batches of a transfer, with addresses. Nothing is computed before the first one is
        taken.
        """
        descriptors = descriptors_between(segments, self._regions, link.regions)
        yield from batches(descriptors, max_bytes, max_descriptors)

    def _next_in_turn(self, is_ready: Callable[[TransferT], bool]) -> TransferT | None:
        """The first transfer that is ready, which moves to the end of the line."""
        for handle, transfer in self._transfers.items():
            if is_ready(transfer):
                self._transfers.move_to_end(handle)
                return transfer
        return None

    def _start(
        self, peer: PeerId, segments: Sequence[Segments], operation: Operation, grant_id: int = 0
    ) -> Handle:
        link = self._linked(peer)
        self._check_segments(segments, link)
        transfer = self._post(link, segments, operation, grant_id)
        self._transfers[transfer.handle] = transfer
        return transfer.handle

    def _linked(self, peer: PeerId) -> LinkT:
        link = self._links.get(peer)
        if link is None:
            raise TransportError(f"peer {peer} is not connected over {self.name}")
        return link

    def _check_segments(self, segments: Sequence[Segments], link: LinkT) -> None:
        check_segments(segments, self._regions, link.regions, link.peer)

    def _check_links(self) -> None:
        if self.link_check_s is not None and time.monotonic() >= self._next_link_check:
            self._next_link_check = time.monotonic() + self.link_check_s
            for link in list(self._links.values()):
                self._is_usable(link)

    def _check_granting(self) -> None:
        if not self.supports_write_grants:
            raise write_grants_unsupported(self.name)
        self._check_open()


OfferT = TypeVar("OfferT", bound=msgspec.Struct)


def decoded_offer(peer: PeerId, offer: TransportOffer, content: type[OfferT]) -> OfferT:
    """The content of a peer's offer. TransportError if it is malformed."""
    try:
        return msgspec.msgpack.decode(offer.blob, type=content)
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"the {offer.transport} offer of {peer} cannot be understood ({error}); do both sides "
            "run the same kvferry?"
        ) from error


def check_offered(
    peer: PeerId, offer: TransportOffer, regions: Sequence[Region], address: int, size_bytes: int
) -> None:
    """TransportError unless a peer's regions lie in the memory that it offers."""
    for region in regions:
        if region.address < address or region.address + region.size_bytes > address + size_bytes:
            raise TransportError(
                f"region {region.name!r} of {peer} is not in the memory it offers over "
                f"{offer.transport}; drop this peer"
            )
