"""Tests of what the object tier does beyond the contract, above all when the store fails.

A real S3 server (moto) runs in its own process. Faults happen on real sockets in front of it.
"""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
from tests.tiers.s3_server import ErrorServer, request, s3_server
from tests.tiers.storages import S3Storage

from kvferry.errors import ConfigError, MissingDependency
from kvferry.testing.fault_proxy import FaultProxy, ProxyDirection
from kvferry.testing.local import ManualClock
from kvferry.testing.tier_conformance import (
    NAMESPACE,
    SECRET,
    aligned_buffer,
    new_key,
    payload_of,
)
from kvferry.tiers.backoff import StorageFailed
from kvferry.tiers.base import EntryKey, LoadOutcome, LoadResult, StoreOutcome
from kvferry.tiers.object_store import (
    TOLERATED_FAILURES,
    Bucket,
    ObjectStoreDeadlines,
    ObjectTier,
)
from kvferry.types import Address

pytestmark = pytest.mark.slow

ACCESS_KEY = "AKIAOFTHETESTS"
SECRET_KEY = "a secret access key that no message may contain"
PAYLOAD_BYTES = 256 * 1024
LONG = ObjectStoreDeadlines(connect_s=30, read_s=30, lookup_s=30, transfer_s=30)
SHORT = ObjectStoreDeadlines(connect_s=0.5, read_s=0.5, lookup_s=1.0, transfer_s=2.0)
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def s3() -> Iterator[Address]:
    with s3_server() as server:
        S3Storage(server, "bucket").make()
        yield server


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture
def storage(s3: Address) -> S3Storage:
    return S3Storage(s3, "bucket")


@pytest.fixture
def proxy(s3: Address) -> Iterator[FaultProxy]:
    with FaultProxy(s3, Address("127.0.0.1", 0)) as proxy:
        yield proxy


@pytest.fixture
def errors(s3: Address) -> Iterator[ErrorServer]:
    server = ErrorServer(s3)
    server.start()
    yield server
    server.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def opened(
    endpoint: Address,
    clock: ManualClock | None = None,
    bucket: str = "bucket",
    deadlines: ObjectStoreDeadlines = LONG,
) -> "closing[ObjectTier]":
    place = S3Storage(endpoint, bucket).place(endpoint)
    return closing(ObjectTier(place, NAMESPACE, SECRET, deadlines, clock or ManualClock()))


def store(tier: ObjectTier, key: EntryKey) -> StoreOutcome:
    return tier.store(key, payload_of(key, PAYLOAD_BYTES)).outcome


def load(tier: ObjectTier, key: EntryKey) -> LoadResult:
    into = aligned_buffer(PAYLOAD_BYTES)
    result = tier.load(key, into)
    assert result.outcome is not LoadOutcome.LOADED or into == payload_of(key, PAYLOAD_BYTES)
    return result


# -- names --


def test_the_bucket_names_what_it_holds(storage: S3Storage) -> None:
    with opened(storage.server) as tier:
        store(tier, new_key())
        assert tier.usage().num_entries == 1
    status, text = request(storage.server, "GET", storage.path(NAMESPACE, "namespace.json"))
    assert (status, text.decode()) == (200, NAMESPACE.text)


def test_a_description_that_the_store_refused_is_sent_with_the_next_object(
    errors: ErrorServer,
) -> None:
    with opened(errors.address) as tier:
        # For the HEAD and the PUT of the object; then three attempts to PUT the description.
        errors.statuses = [None, None, 500, 500, 500]
        for expected in (3, 4, 4):
            assert store(tier, new_key()) is StoreOutcome.STORED
            puts = [each.path for each in errors.seen if each.method == "PUT"]
            assert sum(path.endswith("namespace.json") for path in puts) == expected


def test_the_end_of_a_long_prefix_is_found_with_few_requests(
    storage: S3Storage, errors: ErrorServer
) -> None:
    keys = [new_key() for _ in range(200)]
    for key in keys[:120]:
        storage.write(NAMESPACE, key, b"x")
    with opened(errors.address) as tier:
        for expected, found, most in ((120, keys, 40), (0, keys[120:], 20), (120, keys[:120], 20)):
            errors.seen.clear()
            assert tier.find_prefix(found) == expected
            assert len(errors.seen) <= most


def test_a_huge_object_in_place_of_ours_is_not_read(storage: S3Storage, proxy: FaultProxy) -> None:
    key = new_key()
    storage.write(NAMESPACE, key, bytes(64 * 2**20))
    with opened(proxy.address) as tier:
        assert load(tier, key).outcome is LoadOutcome.REFUSED
    assert proxy.carried_bytes(ProxyDirection.TO_CLIENT) < 32 * 2**20


# -- settings --


def test_a_bucket_that_does_not_exist_fails_stores_and_has_no_objects(s3: Address) -> None:
    with opened(s3, bucket="another-bucket") as tier:
        payload = aligned_buffer(PAYLOAD_BYTES)
        results = [tier.store(new_key(), payload) for _ in range(TOLERATED_FAILURES + 2)]
        # Look-ups before each store succeed, but stores wait all the same.
        *failed, dropped = [result.outcome for result in results]
        assert {*failed} == {StoreOutcome.FAILED}
        assert dropped is StoreOutcome.DROPPED
        assert all("no such bucket" in result.reason for result in results)
        assert load(tier, new_key()).outcome is LoadOutcome.MISSING


@pytest.mark.parametrize("endpoint", ["host:9000", "ftp://host", "http://", "not a url"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        ObjectTier(Bucket("bucket", endpoint=endpoint), NAMESPACE, SECRET)


def test_an_endpoint_with_credentials_is_refused_without_repeating_them() -> None:
    with pytest.raises(ConfigError, match="at host contains credentials") as raised:
        ObjectTier(Bucket("bucket", endpoint="http://user:password@host"), NAMESPACE, SECRET)
    assert "password" not in str(raised.value)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingDependency, match=r"pip install 'kvferry\[object\]'"):
        ObjectTier(Bucket("bucket"), NAMESPACE, SECRET)


def test_a_profile_gives_its_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: ErrorServer
) -> None:
    file = tmp_path / "credentials"
    file.write_text(
        "[default]\naws_access_key_id = OTHER\naws_secret_access_key = x\n"
        "[serving]\naws_access_key_id = AKIAOFTHEPROFILE\naws_secret_access_key = x\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    place = Bucket("bucket", "", f"http://{errors.address}", "us-east-1", profile="serving")
    with closing(ObjectTier(place, NAMESPACE, SECRET)) as tier:
        tier.find([new_key()])
    assert "AKIAOFTHEPROFILE" in errors.seen[0].authorization


def test_a_profile_that_does_not_exist_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    with pytest.raises(ConfigError, match="the profile 'serving'"):
        ObjectTier(Bucket("bucket", profile="serving"), NAMESPACE, SECRET)


def test_credentials_of_the_environment_sign_requests_and_appear_nowhere(
    errors: ErrorServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with opened(errors.address) as tier:
        texts = [repr(tier)]
        for status in (400, 403, 403):
            errors.statuses = [status]
            texts.append(load(tier, new_key()).reason)
    assert ACCESS_KEY in errors.seen[0].authorization
    assert "HTTP status 403: it does not accept the credentials" in texts[-1]
    for text in (*texts, caplog.text):
        assert ACCESS_KEY not in text
        assert SECRET_KEY not in text


# -- failures --


def test_a_store_that_is_down_fails_and_is_then_left_alone(
    proxy: FaultProxy, clock: ManualClock
) -> None:
    with opened(proxy.address, clock) as tier:
        key = new_key()
        assert store(tier, key) is StoreOutcome.STORED
        proxy.refuse()
        proxy.reset()
        results = [load(tier, key) for _ in range(3)]
        assert [result.outcome for result in results] == [LoadOutcome.FAILED] * 3
        assert results[0].reason == "the object store cannot be reached"
        proxy.accept()
        assert load(tier, key).reason.startswith("waiting after a failure: ")
        assert store(tier, new_key()) is StoreOutcome.DROPPED
        for find in (tier.find, tier.find_prefix):
            with pytest.raises(StorageFailed, match="waiting after a failure"):
                find([key])
        clock.advance(5)
        assert load(tier, key).outcome is LoadOutcome.LOADED
        assert store(tier, new_key()) is StoreOutcome.STORED


def test_a_store_that_waits_after_failures_sends_no_request(
    errors: ErrorServer, clock: ManualClock
) -> None:
    with opened(errors.address, clock) as tier:
        errors.statuses = [500] * 100
        for _ in range(3):
            assert load(tier, new_key()).outcome is LoadOutcome.FAILED
        num_seen = len(errors.seen)
        assert num_seen == 9, "each request is sent three times"
        for _ in range(20):
            load(tier, new_key())
            store(tier, new_key())
            with suppress(StorageFailed):
                tier.find([new_key()] * 3)
            tier.remove([new_key()])
        assert len(errors.seen) == num_seen


def test_a_store_that_recovers_at_once_is_not_noticed(errors: ErrorServer) -> None:
    key = new_key()
    with opened(errors.address) as tier:
        errors.statuses = [500, 503]
        assert store(tier, key) is StoreOutcome.STORED
        errors.statuses = [503, 500]
        assert load(tier, key).outcome is LoadOutcome.LOADED
        assert errors.statuses == []


def test_a_bucket_that_may_only_be_read_is_read_while_stores_wait(errors: ErrorServer) -> None:
    """Eight threads store at once, so that failures of stores follow each other."""
    key, payload = new_key(), aligned_buffer(PAYLOAD_BYTES)
    with opened(errors.address) as tier:
        assert tier.store(key, payload_of(key, PAYLOAD_BYTES)).outcome is StoreOutcome.STORED
        errors.put_status, errors.put_barrier = 403, threading.Barrier(8)
        with ThreadPoolExecutor(8) as threads:
            results = list(threads.map(lambda _: tier.store(new_key(), payload), range(8)))
        assert {result.outcome for result in results} == {StoreOutcome.FAILED}
        assert tier.store(new_key(), payload).outcome is StoreOutcome.DROPPED
        assert load(tier, key).outcome is LoadOutcome.LOADED


def test_a_server_that_refuses_the_credentials_is_reported(storage: S3Storage) -> None:
    key = new_key()
    with opened(storage.server) as tier:
        assert store(tier, key) is StoreOutcome.STORED
        assert request(storage.server, "POST", "/moto-api/reset-auth", b"0")[0] == 200
        try:
            result = load(tier, key)
        finally:
            request(storage.server, "POST", "/moto-api/reset-auth", b"inf")
        assert result.outcome is LoadOutcome.FAILED
        assert "HTTP status 403" in result.reason
        assert load(tier, key).outcome is LoadOutcome.LOADED


def test_a_silent_server_costs_a_deadline(proxy: FaultProxy) -> None:
    key = new_key()
    with opened(proxy.address) as patient, opened(proxy.address, deadlines=SHORT) as tier:
        assert store(patient, key) is StoreOutcome.STORED
        proxy.stall()
        result = load(tier, key)
        assert result.outcome is LoadOutcome.FAILED
        assert "did not answer" in result.reason
        with pytest.raises(StorageFailed, match="did not answer"):
            tier.find_prefix([key])
        proxy.flow()
        assert load(patient, key).outcome is LoadOutcome.LOADED


def test_a_look_up_has_a_deadline_of_its_own(proxy: FaultProxy) -> None:
    deadlines = ObjectStoreDeadlines(read_s=1000, lookup_s=0.5, transfer_s=1000)
    with opened(proxy.address, deadlines=deadlines) as tier:
        proxy.stall()
        for find in (tier.find, tier.find_prefix):
            with pytest.raises(StorageFailed, match=r"within 0\.5 s"):
                find([new_key()])
        result = tier.store(new_key(), aligned_buffer(PAYLOAD_BYTES))
    assert result.reason == "the object store did not answer within 0.5 s"


def test_a_slow_server_is_waited_for(proxy: FaultProxy) -> None:
    key = new_key()
    with opened(proxy.address) as tier:
        proxy.delay(0.05)
        assert store(tier, key) is StoreOutcome.STORED
        assert load(tier, key).outcome is LoadOutcome.LOADED


def test_a_body_that_is_cut_off_is_not_loaded(proxy: FaultProxy) -> None:
    key = new_key()
    with opened(proxy.address) as tier:
        assert store(tier, key) is StoreOutcome.STORED
        proxy.cut_after(PAYLOAD_BYTES // 2, ProxyDirection.TO_CLIENT)
        assert load(tier, key).outcome is LoadOutcome.FAILED
        proxy.flow()
        assert load(tier, key).outcome is LoadOutcome.LOADED


def test_a_store_that_is_cut_off_leaves_no_object(storage: S3Storage, proxy: FaultProxy) -> None:
    key = new_key()
    with opened(proxy.address) as tier:
        proxy.cut_after(PAYLOAD_BYTES // 2, ProxyDirection.TO_SERVER)
        assert store(tier, key) is StoreOutcome.FAILED
        assert storage.read(NAMESPACE, key) is None
        proxy.flow()
        assert store(tier, key) is StoreOutcome.STORED


def test_close_ends_requests_under_way(proxy: FaultProxy) -> None:
    place = S3Storage(proxy.address, "bucket").place(proxy.address)
    tier = ObjectTier(place, NAMESPACE, SECRET, ObjectStoreDeadlines(read_s=300, transfer_s=300))
    proxy.stall()
    results: list[LoadResult] = []
    thread = threading.Thread(target=lambda: results.append(load(tier, new_key())))
    thread.start()
    deadline = time.monotonic() + DEADLINE_S
    while proxy.num_accepted == 0:
        assert time.monotonic() < deadline
    tier.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert results[0].outcome is LoadOutcome.FAILED
    assert load(tier, new_key()).reason == "the tier is closed"
