"""Tests the push ticket that a router signs for both legs: a forged one is refused, and a genuine
one cannot be used as any other ticket.
"""

import msgspec
import pytest

from kvferry.errors import InvalidTicket
from kvferry.protocol.tickets import (
    MAX_TICKET_NAME_CHARS,
    PushTicket,
    PushTicketKey,
    Seal,
    TicketKey,
)
from kvferry.types import Address, EngineId, EngineIncarnation, Epoch

KEY = PushTicketKey(b"secret")
TICKET = PushTicket("h1", "p", "e1", "p-host", 5600, 2)


def test_a_push_ticket_says_whom_to_dial_and_by_which_name() -> None:
    opened = KEY.open(KEY.sign(TICKET))
    assert opened == TICKET
    assert (opened.incarnation, opened.address) == (
        EngineIncarnation(EngineId("p"), Epoch("e1")),
        Address("p-host", 5600),
    )


@pytest.mark.parametrize(
    "text", [None, 7, "", "no base64!", "AAAA", PushTicketKey(b"another secret").sign(TICKET)]
)
def test_what_was_not_signed_with_the_clusters_secret_is_refused(text: object) -> None:
    with pytest.raises(InvalidTicket):
        KEY.open(text)


def test_a_push_ticket_is_no_ticket_to_read_with_nor_the_other_way_round() -> None:
    with pytest.raises(InvalidTicket, match="not signed"):
        TicketKey(b"secret").open(KEY.sign(TICKET))


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0},
        {"port": 70_000},
        {"tp_size": 0},
        {"match_id": ""},
        {"engine": "e" * (MAX_TICKET_NAME_CHARS + 1)},
        {"host": ""},
        {"version": 3},
    ],
)
def test_fields_out_of_range_are_refused_although_they_are_signed(
    changes: dict[str, object],
) -> None:
    with pytest.raises(InvalidTicket):
        KEY.open(KEY.sign(msgspec.structs.replace(TICKET, **changes)))


def test_signed_nonsense_is_refused() -> None:
    with pytest.raises(InvalidTicket, match="cannot be decoded"):
        KEY.open(Seal(b"secret", b"kvferry push ticket v1").close(b"\xc1"))
