"""Push tickets: what a router gives both legs of a request that start together.

P has computed nothing yet that it could sign for, so the router, a member of the cluster, does: it says which P the decode side may dial,
and gives the handover a name that is nobody else's, by which the two legs are found to belong together. Pure.
"""

import msgspec

from kvferry.errors import InvalidTicket
from kvferry.protocol.tickets import MAX_NAME_CHARS, Seal
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch

__all__ = ["MAX_TP_SIZE", "PushTicket", "PushTicketKey"]

MAX_TP_SIZE = 4096
PUSH_TICKET_VERSION = 2


class PushTicket(msgspec.Struct, frozen=True):
    match_id: str
    """Random; the same in both legs of one request and in no other."""
    engine: str
    epoch: str
    host: str
    port: int
    """Side channel of the prefill side."""
    tp_size: int
    version: int = PUSH_TICKET_VERSION

    @property
    def incarnation(self) -> EngineIncarnation:
        return EngineIncarnation(EngineId(self.engine), Epoch(self.epoch))

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class PushTicketKey:
    """Signs and checks push tickets with one cluster's secret."""

    def __init__(self, secret: bytes) -> None:
        self._seal = Seal(secret, b"kvferry push ticket v1")

    def sign(self, ticket: PushTicket) -> str:
        return self._seal.close(msgspec.msgpack.encode(ticket))

    def open(self, text: object) -> PushTicket:
        """The ticket in `text`, whole and genuine; InvalidTicket with a reason otherwise."""
        try:
            ticket = msgspec.msgpack.decode(self._seal.open(text), type=PushTicket)
        except msgspec.MsgspecError as error:
            raise InvalidTicket(f"the push ticket cannot be read: {error}") from None
        if ticket.version != PUSH_TICKET_VERSION:
            raise InvalidTicket(f"the push ticket has version {ticket.version}, this engine reads {PUSH_TICKET_VERSION}")
        names = (ticket.match_id, ticket.engine, ticket.epoch, ticket.host)
        if not all(0 < len(name) <= MAX_NAME_CHARS for name in names) or not (
            0 < ticket.port < 65536 and 0 < ticket.tp_size <= MAX_TP_SIZE
        ):
            raise InvalidTicket("the push ticket's fields are out of range")
        return ticket
