"""Tests the wire format of the tcp transport: all input from outside is checked before an address
is used.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import RemoteProtocolError
from kvferry.transports.base import Operation
from kvferry.transports.tcp import wire
from kvferry.types import Region

REGIONS = [
    Region("a", 1000, 100, 100, 3),
    Region("b", 1300, 50, 50, 2),
    Region("overlaps", 1250, 10, 10, 1),
    Region("c", 5000, 10, 10, 1),
]
ALLOWED = {*range(1000, 1400), *range(5000, 5010)}
"""Every registered byte; the first three regions form one range."""

addresses = st.one_of(
    st.integers(900, 1500), st.integers(4990, 5020), st.integers(-(2**63), 2**63 - 1)
)
sizes = st.one_of(st.integers(-3, 450), st.integers(-(2**63), 2**63 - 1))


def rows_of(*runs: tuple[int, int]) -> wire.Rows:
    return np.array(runs, np.int64).reshape(-1, 2)


@given(st.lists(st.tuples(addresses, sizes), min_size=1, max_size=4))
def test_runs_are_allowed_exactly_when_every_byte_of_them_is_registered(
    runs: list[tuple[int, int]],
) -> None:
    is_allowed = all(
        size > 0 and size <= 400 and {*range(address, address + size)} <= ALLOWED
        for address, size in runs
    )
    total = sum(size for _, size in runs)
    ranges = wire.Ranges(REGIONS)
    if is_allowed:
        ranges.check(rows_of(*runs), total)
        with pytest.raises(RemoteProtocolError, match="the request says"):
            ranges.check(rows_of(*runs), total + 1)
    else:
        with pytest.raises(RemoteProtocolError):
            ranges.check(rows_of(*runs), total)


def test_a_header_says_what_is_asked_for() -> None:
    header = wire.pack_header(Operation.WRITE, rows_of((1000, 10), (1200, 30)))
    assert len(header) == wire.HEADER_BYTES
    assert wire.unpack_header(header) == wire.Header(Operation.WRITE, 2, 40, 0)
    numbered = wire.pack_header(Operation.WRITE, rows_of((1000, 10)), 2**64 - 1)
    assert wire.unpack_header(numbered) == wire.Header(Operation.WRITE, 1, 10, 2**64 - 1)
    with pytest.raises(RemoteProtocolError, match="only writes"):
        wire.unpack_header(wire.pack_header(Operation.READ, rows_of((1000, 10)), 1))


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES))
def test_whatever_bytes_come_as_a_header_are_refused_or_within_bounds(received: bytes) -> None:
    try:
        header = wire.unpack_header(received)
    except RemoteProtocolError:
        return
    assert 0 < header.num_descriptors <= wire.MAX_BATCH_DESCRIPTORS
    assert 0 < header.total_bytes <= wire.MAX_BATCH_BYTES


def test_a_refusal_carries_a_bounded_text_and_all_is_well_without_one() -> None:
    assert wire.text_bytes_in(wire.pack_reply()) == 0
    refusal = wire.pack_reply("é" * 5000)
    assert (
        wire.text_bytes_in(refusal[: wire.REPLY_BYTES])
        == len(refusal) - wire.REPLY_BYTES
        == wire.MAX_TEXT_BYTES
    )


@pytest.mark.parametrize(
    "received", [b"\0\0\0\0\x05\0\0\0", b"\1\0\0\0\0\0\0\0", b"\1\0\0\0\xff\xff\xff\xff"]
)
def test_replies_that_make_no_sense_are_refused(received: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.text_bytes_in(received)


def test_a_proof_is_of_this_nonce_this_token_and_this_role() -> None:
    nonce = wire.nonce_in(wire.greeting(b"n" * wire.NONCE_BYTES))
    proof = wire.prove(b"t" * 32, wire.HandshakeRole.DIALLER, nonce)
    assert len(proof) == wire.PROOF_BYTES
    assert wire.is_proof(proof, b"t" * 32, wire.HandshakeRole.DIALLER, nonce)
    assert not wire.is_proof(proof, b"u" * 32, wire.HandshakeRole.DIALLER, nonce)
    assert not wire.is_proof(proof, b"t" * 32, wire.HandshakeRole.DIALLER, b"m" * wire.NONCE_BYTES)
    # A peer cannot send the other side's proof back.
    assert not wire.is_proof(proof, b"t" * 32, wire.HandshakeRole.PRODUCER, nonce)
    with pytest.raises(RemoteProtocolError, match="not kvferry"):
        wire.nonce_in(b"HTTP/1.1 400 Bad Request")
