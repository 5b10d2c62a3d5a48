"""Tickets: what a consumer presents to read a producer's blocks.

Issued by the producer's scheduler when a prefill ends, carried by the router in
`kv_transfer_params`, signed with a key of the cluster secret. A ticket is the only thing that names
a peer: host, port and block ids typed by a client beside it are never used. Pure.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence

import msgspec

from kvferry.errors import InvalidTicket, RemoteProtocolError
from kvferry.protocol.fingerprints import Fingerprint
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch, RequestId

__all__ = [
    "HOLE",
    "MAX_TICKET_CHARS",
    "MAX_TICKET_NAME_CHARS",
    "MAX_TP_SIZE",
    "PushTicket",
    "PushTicketKey",
    "Seal",
    "Ticket",
    "TicketKey",
    "blocks_from_runs",
    "runs_from_blocks",
]


MAX_TICKET_CHARS = 1024 * 1024
MAX_BLOCKS = 1_000_000
MAX_BLOCK_ID = 1 << 31
MAX_TP_SIZE = 4096
MAX_TICKET_NAME_CHARS = 512
"""Of engine, epoch and request: a reader's name is made of two of them and must fit into a
message.
"""
HOLE = -1
"""In a block list: there is no block for these tokens, because no attention of this group looks at
them any more.
"""
TICKET_VERSION = 1
_MAC_BYTES = 32


class Ticket(msgspec.Struct, frozen=True):
    """Which engine incarnation holds which blocks, for which tokens, and for how long at first."""

    engine: str
    epoch: str
    request: str
    """The producer's own request id: the name of the lease."""
    serial: int
    """Tickets of one epoch are numbered from 1 in the order their leases are granted."""
    host: str
    port: int
    """Side channel of the producer."""
    tp_size: int
    block_size: int
    block_runs: list[list[tuple[int, int]]]
    """Per KV-cache group: (first block, count) of each run of adjacent blocks, in token order.
    First block `HOLE`: so many are not kept.
    """
    tokens: Fingerprint
    ttl_s: float
    """So long the blocks are kept when nobody comes."""
    version: int = TICKET_VERSION
    renewal_s: float = 0.0
    """Whoever reads has to be heard of within so long; 0: within `ttl_s`."""

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    @property
    def engine_id(self) -> EngineId:
        return EngineId(self.engine)

    @property
    def epoch_id(self) -> Epoch:
        return Epoch(self.epoch)

    @property
    def lease(self) -> RequestId:
        return RequestId(self.request)

    @property
    def lease_s(self) -> float:
        """What heartbeats go by."""
        return self.renewal_s or self.ttl_s

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(blocks_from_runs(runs) for runs in self.block_runs)


class Seal:
    """Signs and checks what members of one cluster send each other through strangers, for one
    purpose only.
    """

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        self._key = hmac.digest(secret, purpose, hashlib.sha256)

    def close(self, payload: bytes) -> str:
        return base64.urlsafe_b64encode(self._mac(payload) + payload).decode("ascii")

    def open(self, text: object) -> bytes:
        """What `text` was made of; InvalidTicket unless it is whole and genuine. Takes anything a
        client may have sent.
        """
        if not isinstance(text, str) or not text:
            raise InvalidTicket("kv_transfer_params carry no ticket")
        if len(text) > MAX_TICKET_CHARS:
            raise InvalidTicket(
                f"a ticket of {len(text)} characters is over the limit of {MAX_TICKET_CHARS}"
            )
        try:
            data = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise InvalidTicket("the ticket is not base64") from None
        mac, payload = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise InvalidTicket("the ticket was not signed with this cluster's secret")
        return payload

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, hashlib.sha256)


class TicketKey:
    """Signs and checks tickets with one cluster's secret."""

    def __init__(self, secret: bytes) -> None:
        self._seal = Seal(secret, b"kvferry ticket v1")

    def sign(self, ticket: Ticket) -> str:
        return self._seal.close(msgspec.msgpack.encode(ticket))

    def open(self, text: object) -> Ticket:
        """The ticket in `text`, whole and genuine; InvalidTicket with a reason otherwise."""
        return _decode(self._seal.open(text))


def runs_from_blocks(block_ids: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in block_ids:
        first, count = runs[-1] if runs else (0, 0)
        if runs and block == (HOLE if first == HOLE else first + count):
            runs[-1] = (first, count + 1)
        else:
            runs.append((block, 1))
    return runs


def blocks_from_runs(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(
        block
        for first, count in runs
        for block in ([HOLE] * count if first == HOLE else range(first, first + count))
    )


def _decode(payload: bytes) -> Ticket:
    # Signed, so ours or a sibling's; still checked, because a sibling of another version may mean
    # something else by it.
    try:
        ticket = msgspec.msgpack.decode(payload, type=Ticket)
        if ticket.version != TICKET_VERSION:
            raise InvalidTicket(
                f"the ticket has version {ticket.version}, this engine reads {TICKET_VERSION}"
            )
        ticket.tokens.check()
    except (msgspec.DecodeError, msgspec.ValidationError, RemoteProtocolError) as error:
        raise (
            error
            if isinstance(error, InvalidTicket)
            else InvalidTicket(f"the ticket cannot be read: {error}")
        ) from None
    _check_ranges(ticket)
    return ticket


def _check_ranges(ticket: Ticket) -> None:
    counts = [count for runs in ticket.block_runs for _, count in runs]
    firsts = [first for runs in ticket.block_runs for first, _ in runs]
    needed = -(-ticket.num_tokens // ticket.block_size) if ticket.block_size > 0 else -1
    is_good = (
        0 < ticket.port < 65536
        and ticket.host != ""
        and 0 < ticket.tp_size <= MAX_TP_SIZE
        and max(len(ticket.engine), len(ticket.epoch), len(ticket.request)) <= MAX_TICKET_NAME_CHARS
        and ticket.serial > 0
        and 0 < ticket.ttl_s < 1e9
        and 0 <= ticket.renewal_s < 1e9
        and all(count > 0 for count in counts)
        and all(first == HOLE or 0 <= first < MAX_BLOCK_ID for first in firsts)
        and sum(counts) <= MAX_BLOCKS
        and len(ticket.block_runs) > 0
        and all(sum(count for _, count in runs) == needed for runs in ticket.block_runs)
    )
    if not is_good:
        raise InvalidTicket("the ticket's fields are out of range")


# -------------------- push tickets --------------------
# Push tickets: what a router gives both legs of a request that start together.
#
# P has computed nothing yet that it could sign for, so the router, a member of the cluster, does:
# it says which P the decode side may dial, and gives the handover a name that is nobody else's, by
# which the two legs are found to belong together. Pure.


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
            raise InvalidTicket(
                f"the push ticket has version {ticket.version}, this engine reads "
                f"{PUSH_TICKET_VERSION}"
            )
        names = (ticket.match_id, ticket.engine, ticket.epoch, ticket.host)
        if not all(0 < len(name) <= MAX_TICKET_NAME_CHARS for name in names) or not (
            0 < ticket.port < 65536 and 0 < ticket.tp_size <= MAX_TP_SIZE
        ):
            raise InvalidTicket("the push ticket's fields are out of range")
        return ticket
