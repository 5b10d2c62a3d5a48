"""Tests that only a complete, genuine ticket opens, and that any other input raises `InvalidTicket`
with a reason.
"""

import base64
import contextlib
import hashlib
import hmac

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidTicket
from kvferry.protocol.fingerprints import fingerprint
from kvferry.protocol.tickets import (
    MAX_TICKET_CHARS,
    NO_BLOCK,
    Ticket,
    TicketKey,
    blocks_from_runs,
    runs_from_blocks,
)
from kvferry.types import Address

KEY = TicketKey(b"one cluster's secret, long enough")


def make_ticket(**changes: object) -> Ticket:
    fields = {
        "engine": "p",
        "epoch": "e1",
        "request": "r1",
        "serial": 1,
        "host": "127.0.0.1",
        "port": 5600,
        "tp_size": 1,
        "block_size": 4,
        "block_runs": [[(3, 2), (9, 1)]],
        "tokens": fingerprint(range(10), 4, ""),
        "lease_ttl_s": 30.0,
    }
    return Ticket(**(fields | changes))  # type: ignore[arg-type]


def sign_raw(payload: bytes) -> str:
    """Sign the payload as an engine of another version in the same cluster would."""
    key = hmac.digest(b"one cluster's secret, long enough", b"kvferry ticket v1", hashlib.sha256)
    return base64.urlsafe_b64encode(hmac.digest(key, payload, hashlib.sha256) + payload).decode()


def test_a_signed_ticket_opens_unchanged() -> None:
    ticket = make_ticket()
    opened = KEY.open(KEY.sign(ticket))
    assert opened == ticket
    assert opened.block_ids() == ((3, 4, 9),)
    assert opened.address == Address("127.0.0.1", 5600)


def test_another_clusters_ticket_does_not_open() -> None:
    with pytest.raises(InvalidTicket, match="not signed"):
        KEY.open(TicketKey(b"another cluster").sign(make_ticket()))


@given(st.data())
def test_a_ticket_with_any_character_changed_does_not_open(data: st.DataObject) -> None:
    text = KEY.sign(make_ticket())
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters().filter(lambda c: c != text[at]))
    forged = text[:at] + other + text[at + 1 :]
    with contextlib.suppress(InvalidTicket):
        assert (
            KEY.open(forged) == make_ticket()
        )  # base64 padding bits may differ without changing a byte


@given(
    st.one_of(
        st.none(),
        st.integers(),
        st.text(),
        st.binary(),
        st.lists(st.integers()),
        st.dictionaries(st.text(), st.text()),
    )
)
def test_nothing_a_client_can_type_opens_or_raises_anything_else(text: object) -> None:
    with pytest.raises(InvalidTicket):
        KEY.open(text)


def test_an_oversized_ticket_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InvalidTicket, match="over the limit"):
        KEY.open("A" * (MAX_TICKET_CHARS + 1))


def test_the_ticket_of_an_earlier_engines_retained_turn_is_renewed_in_time() -> None:
    opened = KEY.open(KEY.sign(make_ticket(lease_ttl_s=480.0, renewal_s=30.0)))
    assert opened == make_ticket(lease_ttl_s=30.0)


def test_a_signed_ticket_of_another_version_or_shape_is_refused() -> None:
    with pytest.raises(InvalidTicket, match="version 2"):
        KEY.open(KEY.sign(make_ticket(version=2)))
    with pytest.raises(InvalidTicket, match="cannot be decoded"):
        KEY.open(sign_raw(msgspec.msgpack.encode({"engine": "p"})))
    with pytest.raises(InvalidTicket, match="cannot be decoded"):
        KEY.open(sign_raw(b"\xc1"))
    with pytest.raises(InvalidTicket, match="cannot be decoded"):
        KEY.open(
            KEY.sign(
                make_ticket(
                    tokens=msgspec.structs.replace(fingerprint(range(10), 4, ""), digests=b"")
                )
            )
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0},
        {"port": 70_000},
        {"host": ""},
        {"tp_size": 0},
        {"serial": 0},
        {"lease_ttl_s": 0.0},
        {"lease_ttl_s": float("nan")},
        {"renewal_s": -1.0},
        {"block_size": 0},
        {"block_runs": []},
        {"block_runs": [[(0, 0), (3, 3)]]},
        {"block_runs": [[(-2, 3)]]},
        {"block_runs": [[(0, 3)], [(-1, 2)]]},
        {"block_runs": [[(0, 2)]]},
        {"block_runs": [[(0, 10**9)]]},
        {"block_runs": [[(2**63, 3)]]},
        {"tp_size": 10**9},
        {"request": "r" * 1000},
    ],
)
def test_fields_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidTicket, match="out of range"):
        KEY.open(KEY.sign(make_ticket(**changes)))


@given(st.lists(st.integers(NO_BLOCK, 50)))
def test_runs_hold_exactly_the_blocks_in_order(blocks: list[int]) -> None:
    assert list(blocks_from_runs(runs_from_blocks(blocks))) == blocks


def test_adjacent_blocks_become_one_run() -> None:
    assert runs_from_blocks([4, 5, 6, 2, 3]) == [(4, 3), (2, 2)]
    assert runs_from_blocks([NO_BLOCK, NO_BLOCK, 0, 1, NO_BLOCK]) == [
        (NO_BLOCK, 2),
        (0, 2),
        (NO_BLOCK, 1),
    ]
