"""Tests that every tier keeps the contract of `kvferry.tiers.base`."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from tests.tiers.mooncake_store import MooncakeStorage, lender, mooncake_master
from tests.tiers.s3_server import s3_server
from tests.tiers.storages import DiskStorage, S3Storage, mounted

from kvferry.testing.tier_conformance import (
    NAMESPACE,
    SECRET,
    TIER_CASES,
    TierStorage,
    new_key,
    payload_of,
)
from kvferry.tiers.base import LoadOutcome

STORAGES = ("disk", "disk-with-limit", "disk-without-direct-io", "object", "mooncake")


@pytest.fixture(scope="module", params=STORAGES)
def storage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TierStorage]:
    folder = tmp_path_factory.mktemp("tier")
    if request.param == "disk-without-direct-io":
        with mounted(folder, "ramfs") as root:
            yield DiskStorage(root)
    elif request.param == "object":
        with s3_server() as server, pytest.MonkeyPatch.context() as environment:
            environment.setenv("AWS_ACCESS_KEY_ID", "key")
            environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            made = S3Storage(server, "bucket")
            made.make()
            yield made
    elif request.param == "mooncake":
        with mooncake_master() as master, lender(master.address) as client:
            yield MooncakeStorage(master, client)
    else:
        yield DiskStorage(folder, 2**30 if request.param == "disk-with-limit" else None)


@pytest.mark.parametrize("case", TIER_CASES, ids=lambda case: case.__name__)
def test_the_tier_keeps_its_contract(
    storage: TierStorage, case: Callable[[TierStorage], None]
) -> None:
    case(storage)


def test_an_object_of_another_format_version_is_refused_by_name(storage: TierStorage) -> None:
    key = new_key()
    payload = payload_of(key)
    with closing(storage.open(NAMESPACE, SECRET)) as tier:
        tier.store(key, payload)
        sealed = bytearray(storage.read(NAMESPACE, key) or b"")
        sealed[8] += 1
        storage.write(NAMESPACE, key, bytes(sealed))
        result = tier.load(key, payload)
    assert result.outcome is LoadOutcome.REFUSED
    assert "format version" in result.reason
