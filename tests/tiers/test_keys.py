"""Tests of keys: their values never change, since stored objects are found by them, and the native
functions give the same answers as their substitutes.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tiers.base import KEY_BYTES, EntryKey, EntryKeys
from kvferry.tiers.keys import KeyChain, chunk_keys_by_hashlib, group_keys_by_hashlib
from kvferry.tiers.pool.segment import SLOTS, mark_stored_by_numpy
from kvferry.transports.copy.native import native_or

TOKEN_IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60)


def key(number: int) -> EntryKey:
    return EntryKey(random.Random(number).randbytes(KEY_BYTES))


# -- values --


def test_the_keys_of_a_prompt_never_change() -> None:
    chain = KeyChain(16, "tenant", num_groups=2)
    chain.extend(list(range(100_000, 100_040)), 40)
    assert [[each.hex() for each in group] for group in chain.keys] == [
        [
            "64e0f4b5a9655036975f60d6b0246c0d88eac89719b2940ccfc288ad11e99255",
            "e5e6f9ea866eb41a03bde90eb18e3aebd367286969bf0c237fe51597d8d184f8",
        ],
        [
            "90a85484418ad9a57757f38e02a0ab9c2d8a240d26b6f59af2e078beee4afafa",
            "7ca3f0804ca37a53da2b9161c1c0f88d7f248d14982e90a7cc748ebd8c7cd00f",
        ],
    ]


@given(TOKEN_IDS, st.integers(1, 20), st.text(max_size=200), st.integers(0, 60))
def test_a_chain_that_grows_has_the_keys_of_the_whole_sequence(
    token_ids: list[int], chunk_tokens: int, salt: str, first: int
) -> None:
    whole, grown = (KeyChain(chunk_tokens, salt, num_groups=2) for _ in range(2))
    whole.extend(token_ids, len(token_ids))
    grown.extend(token_ids[:first], first)
    grown.extend(token_ids, len(token_ids))
    assert grown.keys == whole.keys
    assert len(grown) == len(token_ids) // chunk_tokens


# -- native functions --


@given(st.binary(max_size=300), TOKEN_IDS, st.integers(1, 20), st.randoms())
def test_native_chunk_keys_are_those_of_hashlib(
    prefix: bytes, token_ids: list[int], chunk_tokens: int, rng: random.Random
) -> None:
    native = native_or("chunk_keys", chunk_keys_by_hashlib)
    first = rng.randint(0, len(token_ids) // chunk_tokens)
    expected = chunk_keys_by_hashlib(prefix, token_ids, chunk_tokens, first)
    assert native(prefix, token_ids, chunk_tokens, first) == expected


def test_native_keys_of_a_group_are_those_of_hashlib() -> None:
    native = native_or("group_keys", group_keys_by_hashlib)
    keys = b"".join(map(key, range(5)))
    for group in (1, 2, 12):
        assert native(keys, group) == group_keys_by_hashlib(keys, group)


@pytest.mark.parametrize(
    ("token_ids", "chunk_tokens", "first"), [([1], 1, 2), ([1], 1, -1), ([1], 0, 0)]
)
def test_a_chunk_that_does_not_exist_is_refused(
    token_ids: list[int], chunk_tokens: int, first: int
) -> None:
    native = native_or("chunk_keys", None)
    if native is None:
        pytest.skip("kvferry was installed without a compiler")
    with pytest.raises(ValueError, match="no such chunk"):
        native(b"", token_ids, chunk_tokens, first)


@pytest.mark.parametrize("token", [2**63, "a", None])
def test_a_token_that_is_no_number_is_refused(token: object) -> None:
    native = native_or("chunk_keys", None)
    if native is None:
        pytest.skip("kvferry was installed without a compiler")
    with pytest.raises((OverflowError, TypeError)):
        native(b"", [1, token], 1, 0)


@given(st.integers(0, 4), st.lists(st.integers(0, 40), max_size=40), st.randoms())
def test_native_lookups_find_what_numpy_finds(
    log_buckets: int, asked: list[int], rng: random.Random
) -> None:
    slots = bytearray(8 * SLOTS << log_buckets)
    words = memoryview(slots).cast("Q")
    for number in range(20):
        bucket = int.from_bytes(key(number)[:8], "little") % (1 << log_buckets)
        upper = int.from_bytes(key(number)[12:16], "little") << 32
        words[bucket * SLOTS + rng.randrange(SLOTS)] = upper | number + 1
    keys = b"".join(map(key, asked))
    answers = []
    for mark in (native_or("mark_stored", mark_stored_by_numpy), mark_stored_by_numpy):
        found = bytearray(len(asked))
        mark(memoryview(slots), keys, found)
        answers.append(found)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("bit", range(32))
def test_a_slot_that_differs_in_one_bit_is_not_the_keys(bit: int) -> None:
    slot = int.from_bytes(key(1)[12:16], "little") ^ 1 << bit
    slots = bytearray(8 * SLOTS)
    memoryview(slots).cast("Q")[3] = slot << 32 | 1
    for mark in (native_or("mark_stored", mark_stored_by_numpy), mark_stored_by_numpy):
        found = bytearray(1)
        mark(memoryview(slots), key(1), found)
        assert found == b"\0"


def test_a_lookup_with_other_sizes_is_refused() -> None:
    native = native_or("mark_stored", None)
    if native is None:
        pytest.skip("kvferry was installed without a compiler")
    bucket = bytearray(8 * SLOTS)
    for slots, keys, found in [
        (bytearray(), key(1), bytearray(1)),
        (3 * bucket, key(1), bytearray(1)),
        (bucket, key(1), bytearray(2)),
    ]:
        with pytest.raises(ValueError, match="power of two"):
            native(memoryview(slots), keys, found)


# -- keys in one piece --


def test_keys_in_one_piece_are_a_sequence_of_keys() -> None:
    each = [key(number) for number in range(4)]
    keys = EntryKeys(b"".join(each))
    assert [*keys] == each
    assert [len(keys), keys[0], keys[-1], [*keys[1:3]]] == [4, each[0], each[3], each[1:3]]
    assert [[*keys[:-1]], [*keys[3:9]], len(keys[9:])] == [each[:3], each[3:], 0]
    with pytest.raises(IndexError):
        keys[4]
