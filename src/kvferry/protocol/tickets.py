"""Tickets and push tickets: signed proof that a consumer may read a producer's blocks.

The producer's scheduler issues a ticket when a prefill ends, signed with a key derived from the
cluster secret. The router carries the ticket in `kv_transfer_params`, and the consumer presents the
ticket to the producer. Only a ticket names a peer: kvferry never uses the host, port and block ids
next to the ticket, which a client could have changed (docs/decisions/003-tickets-and-serials.md).
For push, the router signs a push ticket for both legs. Pure.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable, Sequence

import msgspec

from kvferry.errors import InvalidTicket, RemoteProtocolError
from kvferry.protocol.fingerprints import Fingerprint
from kvferry.types import Address, BlockIds, EngineId, EngineIncarnation, Epoch, RequestId

MAX_TICKET_CHARS = 1024 * 1024
MAX_BLOCKS = 1_000_000
MAX_BLOCK_ID = 1 << 31
MAX_TP_SIZE = 4096
MAX_TICKET_NAME_CHARS = 512
"""Maximum length of an engine id, an epoch and a request id. Half of `messages.MAX_NAME_CHARS`,
because a reader's name joins an engine id and a request id.
"""
NO_BLOCK = -1
"""Entry of a block list for tokens without a block, because no later token attends to these tokens
in this KV-cache group. In push, also for tokens that have not been computed yet.
"""
TICKET_VERSION = 1
_MAC_BYTES = 32


class Ticket(msgspec.Struct, frozen=True):
    """Names an engine incarnation, the leased blocks, their tokens, and the initial lease time."""

    engine: str
    epoch: str
    request: str
    """The producer's request id, which is also the name of the lease."""
    serial: int
    """Number of the ticket within its epoch, from 1, in the order in which leases are granted."""
    host: str
    port: int
    """Host and port are the address of the producer's side channel."""
    tp_size: int
    block_size: int
    block_runs: list[list[tuple[int, int]]]
    """For each KV-cache group, the ranges of adjacent blocks as (first block, count), in token
    order. If the first block is `NO_BLOCK`, the range stands for `count` missing blocks.
    """
    tokens: Fingerprint
    lease_ttl_s: float = msgspec.field(name="ttl_s")
    """A reader must renew the lease within this many seconds."""
    version: int = TICKET_VERSION
    renewal_s: float = 0.0
    """Engines of earlier wire versions set it in the tickets of retained turns, whose `ttl_s` is
    longer. `TicketKey.open` returns tickets whose `lease_ttl_s` is right.
    """
    weights: str = ""
    """The version of the weights that computed the KV; empty for those of the engine's start."""

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)

    @property
    def incarnation(self) -> EngineIncarnation:
        return EngineIncarnation(EngineId(self.engine), Epoch(self.epoch))

    @property
    def lease(self) -> RequestId:
        return RequestId(self.request)

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def block_ids(self) -> BlockIds:
        """Return the block ids of each KV-cache group, from token 0, with `NO_BLOCK` for a gap."""
        return tuple(blocks_from_runs(runs) for runs in self.block_runs)


class Seal:
    """Signs and verifies data that cluster members exchange through untrusted clients.

    The purpose is part of the key, so text sealed for one purpose is invalid for any other.
    """

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        self._key = hmac.digest(secret, purpose, hashlib.sha256)

    def close(self, payload: bytes) -> str:
        """Return the payload with a MAC in front, as base64 text."""
        return base64.urlsafe_b64encode(self._mac(payload) + payload).decode("ascii")

    def open(self, text: object) -> bytes:
        """Return the payload of `text`, or raise InvalidTicket if the signature does not match.

        Accepts any object, because a client may have sent anything.
        """
        if not isinstance(text, str) or not text:
            raise InvalidTicket("kv_transfer_params has no ticket")
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
    """Signs and verifies tickets with the cluster secret."""

    def __init__(self, secret: bytes) -> None:
        self._seal = Seal(secret, b"kvferry ticket v1")

    def sign(self, ticket: Ticket) -> str:
        return self._seal.close(msgspec.msgpack.encode(ticket))

    def open(self, text: object) -> Ticket:
        """Return the verified ticket in `text`, or raise InvalidTicket with the reason."""
        return _decode(self._seal.open(text))


def runs_from_blocks(block_ids: Iterable[int]) -> list[tuple[int, int]]:
    """Encode a block list as (first block, count) ranges of adjacent blocks or of holes."""
    runs: list[tuple[int, int]] = []
    for block in block_ids:
        first, count = runs[-1] if runs else (0, 0)
        if runs and block == (NO_BLOCK if first == NO_BLOCK else first + count):
            runs[-1] = (first, count + 1)
        else:
            runs.append((block, 1))
    return runs


def blocks_from_runs(runs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Decode the (first block, count) ranges of `runs_from_blocks`."""
    return tuple(
        block
        for first, count in runs
        for block in ([NO_BLOCK] * count if first == NO_BLOCK else range(first, first + count))
    )


def _decode(payload: bytes) -> Ticket:
    # The signature proves that a cluster member issued the ticket. The fields are checked all the
    # same, because a member that runs another version may use them differently.
    try:
        ticket = msgspec.msgpack.decode(payload, type=Ticket)
        if ticket.version != TICKET_VERSION:
            raise InvalidTicket(
                f"the ticket has version {ticket.version}, but this engine reads {TICKET_VERSION}"
            )
        ticket.tokens.check()
    except (msgspec.DecodeError, msgspec.ValidationError, RemoteProtocolError) as error:
        raise (
            error
            if isinstance(error, InvalidTicket)
            else InvalidTicket(f"the ticket cannot be decoded: {error}")
        ) from None
    _check_ranges(ticket)
    if ticket.renewal_s:
        ticket = msgspec.structs.replace(ticket, lease_ttl_s=ticket.renewal_s, renewal_s=0.0)
    return ticket


def _check_ranges(ticket: Ticket) -> None:
    counts = [count for runs in ticket.block_runs for _, count in runs]
    firsts = [first for runs in ticket.block_runs for first, _ in runs]
    # Every group lists all blocks from token 0, holes included, so all groups have this length.
    needed = -(-ticket.num_tokens // ticket.block_size) if ticket.block_size > 0 else -1
    is_good = (
        0 < ticket.port < 65536
        and ticket.host != ""
        and 0 < ticket.tp_size <= MAX_TP_SIZE
        and max(len(ticket.engine), len(ticket.epoch), len(ticket.request)) <= MAX_TICKET_NAME_CHARS
        and len(ticket.weights) <= MAX_TICKET_NAME_CHARS
        and ticket.serial > 0
        and 0 < ticket.lease_ttl_s < 1e9
        and 0 <= ticket.renewal_s < 1e9
        and all(count > 0 for count in counts)
        and all(first == NO_BLOCK or 0 <= first < MAX_BLOCK_ID for first in firsts)
        and sum(counts) <= MAX_BLOCKS
        and len(ticket.block_runs) > 0
        and all(sum(count for _, count in runs) == needed for runs in ticket.block_runs)
    )
    if not is_good:
        raise InvalidTicket("the ticket's fields are out of range")


# -- push tickets --
# In push both legs start together, so P has computed nothing yet that P could issue a ticket for.
# The router, a cluster member, signs a push ticket for both legs instead: the push ticket names the
# P that D may connect to, and carries the match id that joins the two legs.


PUSH_TICKET_VERSION = 2


class PushTicket(msgspec.Struct, frozen=True):
    """Names the prefill side of a push and carries the match id of both legs."""

    match_id: str
    """Random id, equal in both legs of one request and different in every other request."""
    engine: str
    epoch: str
    host: str
    port: int
    """Host and port are the address of the prefill side's side channel."""
    tp_size: int
    version: int = PUSH_TICKET_VERSION

    @property
    def incarnation(self) -> EngineIncarnation:
        return EngineIncarnation(EngineId(self.engine), Epoch(self.epoch))

    @property
    def address(self) -> Address:
        return Address(self.host, self.port)


class PushTicketKey:
    """Signs and verifies push tickets with the cluster secret."""

    def __init__(self, secret: bytes) -> None:
        self._seal = Seal(secret, b"kvferry push ticket v1")

    def sign(self, ticket: PushTicket) -> str:
        return self._seal.close(msgspec.msgpack.encode(ticket))

    def open(self, text: object) -> PushTicket:
        """Return the verified push ticket in `text`, or raise InvalidTicket with the reason."""
        try:
            ticket = msgspec.msgpack.decode(self._seal.open(text), type=PushTicket)
        except msgspec.MsgspecError as error:
            raise InvalidTicket(f"the push ticket cannot be decoded: {error}") from None
        if ticket.version != PUSH_TICKET_VERSION:
            raise InvalidTicket(
                f"the push ticket has version {ticket.version}, but this engine reads "
                f"{PUSH_TICKET_VERSION}"
            )
        names = (ticket.match_id, ticket.engine, ticket.epoch, ticket.host)
        if not all(0 < len(name) <= MAX_TICKET_NAME_CHARS for name in names) or not (
            0 < ticket.port < 65536 and 0 < ticket.tp_size <= MAX_TP_SIZE
        ):
            raise InvalidTicket("the push ticket's fields are out of range")
        return ticket
