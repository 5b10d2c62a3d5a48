"""Conformance cases for storage tiers: the contract of `kvferry.tiers.base`, which any
implementation can run.

    for case in TIER_CASES:
        case(storage)      # AssertionError if the tier breaks the contract

`storage` opens tiers on one storage, and reads and replaces stored bytes as other software, a bad
disk or an attacker would. Each case uses keys of its own, so one storage serves all cases.
"""

import mmap
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from kvferry.tiers.base import (
    KEY_BYTES,
    EntryKey,
    LoadOutcome,
    LoadResult,
    StoreOutcome,
    Tier,
)
from kvferry.tiers.keys import Namespace

__all__ = [
    "NAMESPACE",
    "OTHER_NAMESPACE",
    "OTHER_SECRET",
    "SECRET",
    "TIER_CASES",
    "TierStorage",
    "aligned_buffer",
    "new_key",
    "payload_of",
]

NAMESPACE = Namespace({"model": "conformance", "tp_rank": 0})
OTHER_NAMESPACE = Namespace({"model": "conformance", "tp_rank": 1})
SECRET = b"the secret of the conformance cases"
OTHER_SECRET = b"the secret of another cluster"
PAYLOAD_BYTES = 5 * 4096
ODD_SIZES = (1, 4095, 4097, 3 * 4096 + 7)
DEADLINE_S = 60.0


class TierStorage(Protocol):
    """One storage. `read` and `write` go around the tier, and see an entry as stored bytes."""

    def open(self, namespace: Namespace, secret: bytes) -> Tier: ...

    def read(self, namespace: Namespace, key: EntryKey) -> bytes | None: ...

    def write(self, namespace: Namespace, key: EntryKey, stored: bytes) -> None: ...


def new_key() -> EntryKey:
    return EntryKey(secrets.token_bytes(KEY_BYTES))


def aligned_buffer(size_bytes: int) -> memoryview:
    """Zeroed memory that starts at a page boundary."""
    return memoryview(mmap.mmap(-1, max(1, size_bytes)))[:size_bytes]


def payload_of(key: EntryKey, size_bytes: int = PAYLOAD_BYTES) -> memoryview:
    """The contents that all cases store under a key: a function of the key, as in a real store."""
    payload = aligned_buffer(size_bytes)
    random = np.random.default_rng(int.from_bytes(key, "little"))
    payload[:] = random.bytes(size_bytes)
    return payload


# -- storing and loading --


def a_stored_object_is_loaded_unchanged(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        for size_bytes in (PAYLOAD_BYTES, *ODD_SIZES):
            key = new_key()
            payload = payload_of(key, size_bytes)
            before = bytes(payload)
            assert tier.store(key, payload).outcome is StoreOutcome.STORED
            assert bytes(payload) == before, "a store changed its payload"
            _load_and_compare(tier, key, size_bytes)


def another_process_life_finds_the_object(storage: TierStorage) -> None:
    key = new_key()
    with _opened(storage) as tier:
        tier.store(key, payload_of(key))
    with _opened(storage) as tier:
        assert tier.find([key]) == [True]
        _load_and_compare(tier, key)


def an_object_that_was_never_stored_is_missing(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        assert _load(tier, new_key()).outcome is LoadOutcome.MISSING


def an_object_that_is_stored_again_is_present(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        key = new_key()
        assert tier.store(key, payload_of(key)).outcome is StoreOutcome.STORED
        assert tier.store(key, payload_of(key)).outcome is StoreOutcome.PRESENT
        _load_and_compare(tier, key)


def an_object_of_the_wrong_length_is_stored_again(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        key = new_key()
        storage.write(NAMESPACE, key, b"cut off")
        assert tier.store(key, payload_of(key)).outcome is StoreOutcome.STORED
        _load_and_compare(tier, key)


def a_removed_object_is_missing_and_can_be_stored_again(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        key, kept = new_key(), new_key()
        for each in (key, kept):
            tier.store(each, payload_of(each))
        tier.remove([key, new_key()])
        assert tier.find([key, kept]) == [False, True]
        assert _load(tier, key).outcome is LoadOutcome.MISSING
        assert tier.store(key, payload_of(key)).outcome is StoreOutcome.STORED
        _load_and_compare(tier, key)


def find_answers_for_each_key(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        keys = [new_key() for _ in range(7)]
        for key in keys[::2]:
            tier.store(key, payload_of(key))
        assert tier.find(keys) == [True, False, True, False, True, False, True]
        assert tier.find([]) == []


def find_prefix_counts_the_stored_keys_of_a_prefix(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        keys = [new_key() for _ in range(24)]
        assert tier.find_prefix([]) == 0
        assert tier.find_prefix(keys) == 0
        for number, key in enumerate(keys, start=1):
            tier.store(key, payload_of(key, 64))
            assert tier.find_prefix(keys) == number


def namespaces_do_not_see_each_other(storage: TierStorage) -> None:
    with _opened(storage) as tier, _opened(storage, OTHER_NAMESPACE) as other:
        key = new_key()
        tier.store(key, payload_of(key))
        assert other.find([key]) == [False]
        assert _load(other, key).outcome is LoadOutcome.MISSING
        other.remove([key])
        _load_and_compare(tier, key)


# -- damage --


def every_kind_of_damage_is_refused_and_removed(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        key = new_key()
        tier.store(key, payload_of(key))
        sealed = storage.read(NAMESPACE, key)
        assert sealed is not None
        for what, damaged in _damages(sealed):
            storage.write(NAMESPACE, key, damaged)
            _assert_refused(storage, tier, key, what)
        storage.write(NAMESPACE, key, sealed)
        _load_and_compare(tier, key)


def a_load_of_another_length_is_refused(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        for wrong_bytes in (PAYLOAD_BYTES - 4096, PAYLOAD_BYTES + 4096, PAYLOAD_BYTES - 1):
            key = new_key()
            tier.store(key, payload_of(key))
            outcome = tier.load(key, aligned_buffer(wrong_bytes)).outcome
            assert outcome is LoadOutcome.REFUSED
            assert storage.read(NAMESPACE, key) is None


def the_object_of_another_key_is_refused(storage: TierStorage) -> None:
    with _opened(storage) as tier:
        key, other = new_key(), new_key()
        tier.store(other, payload_of(other))
        storage.write(NAMESPACE, key, _stored(storage, NAMESPACE, other))
        _assert_refused(storage, tier, key, "another key")
        _load_and_compare(tier, other)


def the_object_of_another_namespace_is_refused(storage: TierStorage) -> None:
    with _opened(storage) as tier, _opened(storage, OTHER_NAMESPACE) as other:
        key = new_key()
        other.store(key, payload_of(key))
        storage.write(NAMESPACE, key, _stored(storage, OTHER_NAMESPACE, key))
        _assert_refused(storage, tier, key, "another namespace")


def an_object_sealed_with_another_secret_is_refused(storage: TierStorage) -> None:
    with _opened(storage) as tier, _opened(storage, secret=OTHER_SECRET) as forger:
        key = new_key()
        assert forger.store(key, payload_of(key)).outcome is StoreOutcome.STORED
        _load_and_compare(forger, key)
        _assert_refused(storage, tier, key, "another secret")


# -- concurrency --


def two_writers_of_one_key_leave_one_good_object(storage: TierStorage) -> None:
    with _opened(storage) as first, _opened(storage) as second:
        keys = [new_key() for _ in range(20)]

        def write(tier: Tier) -> None:
            for key in keys:
                outcome = tier.store(key, payload_of(key)).outcome
                assert outcome in (StoreOutcome.STORED, StoreOutcome.PRESENT), outcome

        _run_together(lambda: write(first), lambda: write(second))
        for key in keys:
            _load_and_compare(first, key)


def a_reader_sees_a_whole_object_or_none_while_others_replace_it(storage: TierStorage) -> None:
    with _opened(storage) as writer, _opened(storage) as reader:
        key = new_key()
        outcomes: set[LoadOutcome] = set()
        is_done = threading.Event()

        def replace() -> None:
            try:
                for _ in range(40):
                    writer.store(key, payload_of(key))
                    writer.remove([key])
                writer.store(key, payload_of(key))
            finally:
                is_done.set()

        def read() -> None:
            while not is_done.is_set():
                into = aligned_buffer(PAYLOAD_BYTES)
                result = reader.load(key, into)
                outcomes.add(result.outcome)
                assert result.outcome is not LoadOutcome.LOADED or into == payload_of(key)

        _run_together(replace, read, read)
        assert outcomes <= {LoadOutcome.LOADED, LoadOutcome.MISSING}, outcomes
        _load_and_compare(reader, key)


def many_threads_may_use_one_tier(storage: TierStorage) -> None:
    with _opened(storage) as tier:

        def work() -> None:
            keys = [new_key() for _ in range(8)]
            for key in keys:
                assert tier.store(key, payload_of(key)).outcome is StoreOutcome.STORED
            assert tier.find_prefix(keys) == len(keys)
            for key in keys:
                _load_and_compare(tier, key)
            tier.remove(keys)
            assert not any(tier.find(keys))

        _run_together(*[work] * 4)


def close_keeps_objects_and_is_idempotent(storage: TierStorage) -> None:
    key = new_key()
    threads_before = threading.active_count()
    tier = storage.open(NAMESPACE, SECRET)
    tier.store(key, payload_of(key))
    assert tier.usage().num_entries >= 0
    tier.close()
    tier.close()
    assert threading.active_count() <= threads_before, "a closed tier keeps a thread"
    assert storage.read(NAMESPACE, key) is not None


TIER_CASES: tuple[Callable[[TierStorage], None], ...] = (
    a_stored_object_is_loaded_unchanged,
    another_process_life_finds_the_object,
    an_object_that_was_never_stored_is_missing,
    an_object_that_is_stored_again_is_present,
    an_object_of_the_wrong_length_is_stored_again,
    a_removed_object_is_missing_and_can_be_stored_again,
    find_answers_for_each_key,
    find_prefix_counts_the_stored_keys_of_a_prefix,
    namespaces_do_not_see_each_other,
    every_kind_of_damage_is_refused_and_removed,
    a_load_of_another_length_is_refused,
    the_object_of_another_key_is_refused,
    the_object_of_another_namespace_is_refused,
    an_object_sealed_with_another_secret_is_refused,
    two_writers_of_one_key_leave_one_good_object,
    a_reader_sees_a_whole_object_or_none_while_others_replace_it,
    many_threads_may_use_one_tier,
    close_keeps_objects_and_is_idempotent,
)


@contextmanager
def _opened(
    storage: TierStorage, namespace: Namespace = NAMESPACE, secret: bytes = SECRET
) -> Iterator[Tier]:
    tier = storage.open(namespace, secret)
    try:
        yield tier
    finally:
        tier.close()


def _load(tier: Tier, key: EntryKey) -> LoadResult:
    return tier.load(key, aligned_buffer(PAYLOAD_BYTES))


def _load_and_compare(tier: Tier, key: EntryKey, size_bytes: int = PAYLOAD_BYTES) -> None:
    into = aligned_buffer(size_bytes)
    result = tier.load(key, into)
    assert result.outcome is LoadOutcome.LOADED, result
    assert into == payload_of(key, size_bytes), "other bytes were loaded than stored"


def _stored(storage: TierStorage, namespace: Namespace, key: EntryKey) -> bytes:
    stored = storage.read(namespace, key)
    assert stored is not None
    return stored


def _assert_refused(storage: TierStorage, tier: Tier, key: EntryKey, what: str) -> None:
    result = _load(tier, key)
    assert result.outcome is LoadOutcome.REFUSED, f"{what}: {result}"
    assert result.reason, f"{what}: refused without a reason"
    assert storage.read(NAMESPACE, key) is None, f"{what}: the refused object is still stored"
    assert _load(tier, key).outcome is LoadOutcome.MISSING


def _damages(sealed: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield each kind of damage with the damaged bytes."""
    size = len(sealed)
    for at in (0, 9, 40, size // 3, size // 2, size - PAYLOAD_BYTES, size - 1):
        flipped = bytearray(sealed)
        flipped[at] ^= 0x10
        yield f"a flipped bit in byte {at}", bytes(flipped)
    for length in (0, 1, 100, size - PAYLOAD_BYTES, size // 2, size - 1):
        yield f"truncated to {length} bytes", sealed[:length]
    yield "one byte too long", sealed + b"\0"
    yield "a page too long", sealed + bytes(4096)
    yield "zeros", bytes(size)
    yield (
        "the second half is zero, as after a power failure",
        sealed[: size // 2].ljust(size, b"\0"),
    )
    yield "two swapped pages", sealed[:-8192] + sealed[-4096:] + sealed[-8192:-4096]
    yield "a file of other software", b"PK\x03\x04" + bytes(size - 4)


def _run_together(*tasks: Callable[[], None]) -> None:
    """Run the tasks in threads, and raise the first exception of any of them."""
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), f"a call did not return within {DEADLINE_S:g} s"
    if errors:
        raise errors[0]
