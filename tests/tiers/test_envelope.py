"""Tests that an envelope accepts an object as it was sealed, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tiers.base import KEY_BYTES, EntryKey
from kvferry.tiers.envelope import HEADER_BYTES, Envelope, Refusal

SECRET = b"secret"
NAMESPACE = bytes(range(16))
KEY = EntryKey(bytes(range(KEY_BYTES)))
ENVELOPE = Envelope(SECRET, NAMESPACE)
PAYLOAD = bytes(range(256)) * 20


def check(sealed: bytes, payload_bytes: int = len(PAYLOAD)) -> Refusal | None:
    payload = sealed[HEADER_BYTES:][:payload_bytes].ljust(payload_bytes, b"\0")
    header = memoryview(sealed[:HEADER_BYTES])
    return ENVELOPE.check(KEY, header, memoryview(payload), len(sealed))


def seal(envelope: Envelope = ENVELOPE, key: EntryKey = KEY, payload: bytes = PAYLOAD) -> bytes:
    return envelope.seal(key, memoryview(payload)) + payload


@given(st.binary(max_size=20_000), st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES))
def test_what_was_sealed_is_accepted(payload: bytes, key: bytes) -> None:
    header = ENVELOPE.seal(EntryKey(key), memoryview(payload))
    assert len(header) == HEADER_BYTES
    stored_bytes = HEADER_BYTES + len(payload)
    accepted = ENVELOPE.check(EntryKey(key), memoryview(header), memoryview(payload), stored_bytes)
    assert accepted is None


@given(st.integers(0, 8 * (HEADER_BYTES + len(PAYLOAD)) - 1))
def test_any_flipped_bit_is_refused(bit: int) -> None:
    damaged = bytearray(seal())
    damaged[bit // 8] ^= 1 << bit % 8
    assert check(bytes(damaged)) is not None


@given(st.integers(0, HEADER_BYTES + len(PAYLOAD) - 1))
def test_any_truncation_is_refused(length: int) -> None:
    assert check(seal()[:length]) in (Refusal.OTHER_LENGTH, Refusal.NOT_AN_ENTRY)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_arbitrary_bytes_are_refused(junk: bytes) -> None:
    assert check(junk) is not None


OTHER_KEY = EntryKey(bytes(KEY_BYTES))
VERSION_AT = 8
OTHER_VERSION = seal()[:VERSION_AT] + b"\x63" + seal()[VERSION_AT + 1 :]


@pytest.mark.parametrize(
    ("sealed", "refusal"),
    [
        (seal(), None),
        (b"x" + seal()[1:], Refusal.NOT_AN_ENTRY),
        (b"", Refusal.NOT_AN_ENTRY),
        (OTHER_VERSION, Refusal.OTHER_VERSION),
        (seal(Envelope(SECRET, bytes(16))), Refusal.OTHER_NAMESPACE),
        (seal(key=OTHER_KEY), Refusal.OTHER_KEY),
        (seal()[:100], Refusal.OTHER_LENGTH),
        (seal()[:-1], Refusal.OTHER_LENGTH),
        (seal() + b"\0", Refusal.OTHER_LENGTH),
        (seal(payload=PAYLOAD[:-1]) + b"\0", Refusal.OTHER_LENGTH),
        (seal(Envelope(b"another secret", NAMESPACE)), Refusal.BAD_MAC),
        (seal()[:-1] + b"\0", Refusal.BAD_MAC),
    ],
)
def test_each_kind_of_wrong_object_has_its_own_reason(
    sealed: bytes, refusal: Refusal | None
) -> None:
    assert check(sealed) is refusal


def test_reasons_differ() -> None:
    assert len({refusal.value for refusal in Refusal}) == 6
