"""Which tickets this engine reads, and which it has read: requests that share one read it once. Pure."""

from dataclasses import dataclass, field

from kvferry.types import RequestId

__all__ = ["SharedTicketKey", "SharedTickets"]

MAX_READ_TICKETS = 10_000

SharedTicketKey = tuple[str, str, int | str]
"""Engine, epoch and serial: one lease of one engine incarnation; or the handover that its push ticket names, where the lease is yet to
come.
"""


@dataclass(slots=True)
class SharedTickets:
    _loading: dict[RequestId, SharedTicketKey | None] = field(default_factory=dict)
    """None: a request that only waits to be told of its failure."""
    _reading: set[SharedTicketKey] = field(default_factory=set)
    # In the order they were read, the oldest forgotten first.
    _read: dict[SharedTicketKey, None] = field(default_factory=dict)

    def is_loading(self, request: RequestId) -> bool:
        return request in self._loading

    def is_being_read(self, ticket: SharedTicketKey | None) -> bool:
        return ticket in self._reading

    def was_read(self, ticket: SharedTicketKey | None) -> bool:
        return ticket in self._read

    def begin(self, request: RequestId, ticket: SharedTicketKey | None) -> None:
        self._loading[request] = ticket
        if ticket is not None:
            self._reading.add(ticket)

    def end(self, request: RequestId, is_good: bool) -> None:
        ticket = self._loading.pop(request)
        if ticket is None:
            return
        self._reading.discard(ticket)
        if is_good:
            self._read[ticket] = None
            while len(self._read) > MAX_READ_TICKETS:
                del self._read[next(iter(self._read))]
