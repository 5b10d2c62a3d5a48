"""Tests `kvferry store` on real folders, buckets and host pools, beside tiers that use them."""

import json
import mmap
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest
from tests.tiers.s3_server import request, s3_server

from kvferry.cli.main import main
from kvferry.testing.tier_conformance import aligned_buffer, new_key, payload_of
from kvferry.tiers.base import EntryKey, LoadOutcome, StoreOutcome, Tier
from kvferry.tiers.disk.tier import DiskTier
from kvferry.tiers.inventory.base import Condition
from kvferry.tiers.inventory.disk import DiskInventory
from kvferry.tiers.keys import Namespace
from kvferry.tiers.object_store import Bucket, ObjectTier
from kvferry.tiers.pool.host_pool import HostPool
from kvferry.tiers.pool.policies import LruPolicy
from kvferry.transports.base import RowBlocks
from kvferry.transports.copy.rows import CpuRowCopier
from kvferry.types import Address, Region

SECRET = "a secret of at least sixteen bytes"
SIZES = {0: (4096, 1000), 1: (512,)}
"""The sizes of a block in each region, by group; the rows of the two groups differ in size."""
SPACE = Namespace(
    {
        "architecture": "LlamaForCausalLM",
        "num_layers": 2,
        "cache_dtype": "bfloat16",
        "weights": "0123456789abcdef",
        "tp_rank": 1,
        "tp_size": 2,
        "blocks_per_chunk": 2,
        "regions": [[group, size, []] for group, sizes in SIZES.items() for size in sizes],
    }
)
OTHER = Namespace({**SPACE.factors, "tp_rank": 0})


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SECRET", SECRET)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["store", *arguments]) == code
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    return json.loads(printed(capsys, *arguments, "--json", code=code))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one sentence of a command that was refused."""
    assert main(["store", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def filled(tier: Tier, count: int = 3) -> list[EntryKey]:
    keys = [new_key() for _ in range(count)]
    for key in keys:
        assert tier.store(key, payload_of(key)).outcome is StoreOutcome.STORED
    return keys


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# -- disk --


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def tier_on(disk: Path, namespace: Namespace = SPACE) -> DiskTier:
    return DiskTier(disk, namespace, SECRET.encode(), None)


def path_of(disk: Path, key: EntryKey, namespace: Namespace = SPACE) -> Path:
    return disk / namespace.hex / key.hex()[:2] / key.hex()


def test_a_folder_lists_its_namespaces_with_what_they_are_of(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tier_on(disk), 3)
    filled(tier_on(disk, OTHER), 2)
    (disk / "notes.txt").write_text("of the operator")
    rows = {
        row["namespace"]: row for row in as_json(capsys, "ls", "--disk", str(disk))["namespaces"]
    }
    assert {name: row["objects"] for name, row in rows.items()} == {SPACE.hex: 3, OTHER.hex: 2}
    stored = sum(path.stat().st_size for path in (disk / SPACE.hex).glob("??/*"))
    assert rows[SPACE.hex]["bytes"] == stored
    assert rows[SPACE.hex]["factors"]["tp_rank"] == 1
    text = printed(capsys, "ls", "--disk", str(disk))
    (line,) = (line for line in text.splitlines() if SPACE.hex in line)
    assert "LlamaForCausalLM (2 layers)  bfloat16  0123456789ab  1 of 2  3 " in line


def test_stat_shows_every_factor_of_one_namespace(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tier_on(disk))
    text = printed(capsys, "stat", "--disk", str(disk))
    assert [name for name in SPACE.factors if f"  {name} " not in text] == []
    filled(tier_on(disk, OTHER))
    assert "choose one with --namespace" in refused(capsys, "stat", "--disk", str(disk))
    chosen = as_json(capsys, "stat", "--disk", str(disk), "--namespace", OTHER.hex[:6])
    assert [row["factors"] for row in chosen["namespaces"]] == [dict(OTHER.factors)]
    assert "no namespace starts with" in refused(
        capsys, "stat", "--disk", str(disk), "--namespace", "0" * 32
    )


def test_a_description_of_another_namespace_is_not_believed(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tier_on(disk))
    (disk / SPACE.hex / "namespace.json").write_text(OTHER.text)
    (row,) = as_json(capsys, "ls", "--disk", str(disk))["namespaces"]
    assert row["factors"] is None
    assert "unknown" in printed(capsys, "ls", "--disk", str(disk))


@pytest.mark.parametrize("instead", ["FIFO", "link", "folder"])
def test_a_description_that_is_no_file_is_not_read(
    disk: Path, capsys: pytest.CaptureFixture[str], instead: str
) -> None:
    filled(tier_on(disk))
    path = disk / SPACE.hex / "namespace.json"
    path.rename(disk / "elsewhere")
    {"FIFO": os.mkfifo, "link": lambda path: path.symlink_to("../elsewhere"), "folder": os.mkdir}[
        instead
    ](path)
    for action in ("ls", "stat"):
        (row,) = as_json(capsys, action, "--disk", str(disk))["namespaces"]
        assert (row["objects"], row["factors"]) == (3, None)
        printed(capsys, action, "--disk", str(disk))


def test_stored_texts_reach_the_terminal_as_escapes(
    disk: Path, pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x7f\u202e\r\nkvferry: no damage"
    space = Namespace({**SPACE.factors, "architecture": evil, "cache_dtype": evil, evil: evil})
    tier_on(disk, space)
    cache = Cache(pool)
    cache.store(0, 0)
    cache.pool.row(0)[17] ^= 1
    (path,) = pool.iterdir()
    path.rename(path.with_name(f"{SPACE.hex}-\x1b[31m.rows"))
    for place in (["--disk", str(disk)], ["--pool", str(pool)]):
        for action in ("ls", "stat", "verify"):
            main(["store", action, *place])
            lines = capsys.readouterr().out.split("\n")
            assert [line for line in lines if not line.isprintable()] == []
    cache.pool.close()


def test_verify_reads_huge_files_in_small_pieces(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = filled(tier_on(disk), 5)
    huge_bytes = 256 << 20
    for number, key in enumerate(keys[1:]):
        path = path_of(disk, key)
        if number == 0:  # with the header of an object of this size
            header = bytearray(path.read_bytes()[:4096])
            struct.pack_into("<Q", header, 60, huge_bytes - 4096)
            path.write_bytes(header)
        else:
            path.write_bytes(b"")
        os.truncate(path, huge_bytes)
    tracemalloc.start()
    try:
        (place,) = as_json(capsys, "verify", "--disk", str(disk), code=1)["places"]
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (place["sound"], place["damaged"]) == (1, 4)
    assert sorted(each["condition"] for each in place["objects"]) == ["damaged"] * 3 + ["unproven"]
    assert peak_bytes < 32 << 20


def test_verify_finds_every_damaged_object_and_removes_only_those(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = filled(tier_on(disk), 70)
    assert as_json(capsys, "verify", "--disk", str(disk))["places"][0]["sound"] == 70
    flip_bit(path_of(disk, keys[3]), 5000)
    path_of(disk, keys[5]).write_bytes(path_of(disk, keys[6]).read_bytes())
    os.truncate(path_of(disk, keys[7]), 100)
    (place,) = as_json(capsys, "verify", "--disk", str(disk), code=1)["places"]
    bad = {keys[3].hex(): "unproven", keys[5].hex(): "damaged", keys[7].hex(): "damaged"}
    assert {each["name"]: each["condition"] for each in place["objects"]} == bad
    assert all(path_of(disk, key).exists() for key in keys)
    (place,) = as_json(capsys, "verify", "--disk", str(disk), "--remove", code=1)["places"]
    assert (place["damaged"], place["removed"]) == (3, 3)
    assert [key.hex() for key in keys if not path_of(disk, key).exists()] == list(bad)
    assert as_json(capsys, "verify", "--disk", str(disk))["places"][0]["damaged"] == 0


def test_another_secret_removes_nothing(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a truncated object is damaged whatever the secret is."""
    keys = filled(tier_on(disk), 5)
    os.truncate(path_of(disk, keys[0]), 4096)
    monkeypatch.setenv("KVFERRY_SECRET", "the secret of another cluster")
    text = printed(capsys, "verify", "--disk", str(disk), "--remove", code=1)
    assert "no object matches this secret" in text
    assert [path_of(disk, key).exists() for key in keys] == [False, True, True, True, True]


def test_verify_makes_no_secret(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    filled(tier_on(disk))
    monkeypatch.delenv("KVFERRY_SECRET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert "set KVFERRY_SECRET_FILE" in refused(capsys, "verify", "--disk", str(disk))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv"]


def test_an_object_that_was_evicted_during_the_walk_is_not_damaged(disk: Path) -> None:
    keys = filled(tier_on(disk), 2)
    inventory = DiskInventory(disk, SECRET.encode())
    names = list(inventory.objects(SPACE.hex))
    path_of(disk, keys[0]).unlink()
    found = {name: inventory.check(SPACE.hex, name).condition for name in names}
    assert found == {keys[0].hex(): Condition.GONE, keys[1].hex(): Condition.SOUND}


def test_clear_deletes_only_after_yes(disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tier_on(disk), 3)
    filled(tier_on(disk, OTHER), 2)
    (disk / OTHER.hex / "namespace.json").unlink()
    (disk / "notes.txt").write_text("of the operator")
    sentence = refused(capsys, "clear", "--disk", str(disk))
    assert "5 objects of 2 namespaces" in sentence
    assert sentence.endswith("add --yes to delete them")
    assert len(list(disk.glob("*/??/*"))) == 5
    printed(capsys, "clear", "--disk", str(disk), "--namespace", OTHER.hex, "--yes")
    assert sorted(path.name for path in disk.iterdir()) == sorted([SPACE.hex, "notes.txt"])
    assert as_json(capsys, "clear", "--disk", str(disk), "--yes")["places"][0]["deleted"] == 3
    assert [path.name for path in disk.iterdir()] == ["notes.txt"]


def test_a_running_engine_goes_on_after_its_folder_was_cleared(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = tier_on(disk)
    keys = filled(tier)
    folder = path_of(disk, keys[0]).parent
    draft = folder / f".{keys[0].hex()}.{'0' * 16}.tmp"
    draft.write_bytes(b"an engine is writing")
    printed(capsys, "clear", "--disk", str(disk), "--yes")
    assert draft.exists()
    assert tier.load(keys[0], aligned_buffer(len(payload_of(keys[0])))).outcome is (
        LoadOutcome.MISSING
    )
    (key,) = filled(tier, 1)
    assert tier.load(key, aligned_buffer(len(payload_of(key)))).outcome is LoadOutcome.LOADED
    draft.unlink()
    printed(capsys, "clear", "--disk", str(disk), "--yes")
    (again,) = filled(tier, 1)
    (row,) = as_json(capsys, "ls", "--disk", str(disk))["namespaces"]
    assert row["objects"] == 1
    assert row["factors"]["architecture"] == "LlamaForCausalLM"
    assert path_of(disk, again).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "--disk", "/nowhere/kv"], "name the folder of a disk tier"),
        (["ls", "--endpoint", "http://localhost"], "name the bucket with --object"),
        (["ls", "--remove"], "is for `kvferry store verify`"),
        (["clear", "--yes"], "name --disk, --object or --pool"),
        (["ls", "--namespace", "XY"], "not made of hex digits"),
        (["ls", "--disk", "/a\0b"], "--disk has a NUL character"),
        (["ls", "--pool", "/a\0b"], "--pool has a NUL character"),
        (["rm"], "invalid choice"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_with_the_fix(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, *arguments)


# -- host pool --


class Cache:
    """A small cache in host memory with two groups, and a pool for its rows."""

    def __init__(self, folder: Path, num_rows: int = 8) -> None:
        self._pages = mmap.mmap(-1, 1 << 20)
        bytes_of_cache = np.frombuffer(self._pages, np.uint8)
        bytes_of_cache[:] = np.random.default_rng(1).integers(0, 256, 1 << 20)
        regions: list[Region] = []
        address = int(bytes_of_cache.ctypes.data)
        for group, sizes in SIZES.items():
            for size in sizes:
                regions.append(Region(f"r{len(regions)}", address, size, size, 8, group=group))
                address += 8 * size
        self._copier = CpuRowCopier(regions)
        row_bytes = max(self._copier.row_bytes(group, 2) for group in SIZES)
        self.pool = HostPool.open(folder, SPACE, row_bytes, num_rows, LruPolicy)

    def store(self, group: int, block: int) -> EntryKey:
        key = new_key()
        row = self.pool.reserve(key)
        assert row is not None
        rows = [RowBlocks(self.pool.row_address(row), group, (block, block + 1))]
        self.pool.publish(row, self._copier.save(rows)[0])
        return key


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    return tmp_path / "pool"


def test_a_pool_lists_its_segments_and_whether_their_owner_lives(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no KV" in printed(capsys, "ls", "--pool", str(pool))
    cache = Cache(pool)
    cache.store(0, 0)
    cache.store(1, 4)
    (row,) = as_json(capsys, "ls", "--pool", str(pool))["namespaces"]
    assert (row["namespace"], row["objects"]) == (SPACE.hex, 2)
    assert [(s["owner_pid"], s["is_live"]) for s in row["segments"]] == [(os.getpid(), True)]
    assert f"  {os.getpid()}" in printed(capsys, "ls", "--pool", str(pool)).splitlines()[-1]
    cache.pool.close()
    assert printed(capsys, "ls", "--pool", str(pool)).splitlines()[-1].rstrip().endswith("none")


def test_a_segment_with_a_damaged_time_is_listed(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache(pool)
    cache.store(0, 0)
    cache.pool.close()
    (path,) = pool.iterdir()
    with path.open("r+b") as file:
        file.seek(72)
        file.write(b"\xff" * 8)
    (row,) = as_json(capsys, "ls", "--pool", str(pool))["namespaces"]
    assert (row["objects"], row["last_used"]) == (1, "unknown")
    assert "unknown" in printed(capsys, "stat", "--pool", str(pool))


def test_verify_checks_the_rows_of_all_groups(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache(pool)
    for group in (0, 1, 0, 1):
        cache.store(group, 2)
    assert as_json(capsys, "verify", "--pool", str(pool))["places"][0]["sound"] == 4
    row = cache.pool.row(0)
    row[17] ^= 1
    (place,) = as_json(capsys, "verify", "--pool", str(pool), "--remove", code=1)["places"]
    assert (place["sound"], place["damaged"], place["removed"]) == (3, 1, 0)
    assert place["objects"][0]["reason"] == "differs from its checksum"
    del row
    cache.pool.close()
    text = printed(capsys, "verify", "--pool", str(pool), "--remove", code=1)
    assert "1 removed" in text
    assert list(pool.iterdir()) == []


def test_clear_leaves_segments_of_running_engines(
    pool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    living, dead = Cache(pool), Cache(pool)
    key = living.store(0, 0)
    dead.store(0, 2)
    dead.pool.close()
    text = printed(capsys, "clear", "--pool", str(pool), "--yes")
    assert "1 objects deleted; engines are still using" in text
    assert living.pool.find(key) is not None
    assert len(list(pool.iterdir())) == 1
    living.pool.close()
    printed(capsys, "clear", "--pool", str(pool), "--yes")
    assert list(pool.iterdir()) == []


def test_a_folder_of_another_kind_is_refused_as_a_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert "name the folder of this user's host pool" in refused(
        capsys, "ls", "--pool", str(tmp_path / "link")
    )


# -- bucket --


@pytest.fixture(scope="module")
def server() -> Iterator[Address]:
    with s3_server() as address:
        yield address


@pytest.fixture
def bucket(server: Address, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Bucket]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    name = f"bucket-{token_hex(4)}"
    assert request(server, "PUT", f"/{name}")[0] == 200
    return name, Bucket(name, "kvferry", f"http://{server}", "us-east-1")


def test_a_bucket_is_listed_checked_and_cleared_like_a_folder(
    server: Address, bucket: tuple[str, Bucket], capsys: pytest.CaptureFixture[str]
) -> None:
    name, place = bucket
    flags = ["--object", name, "--endpoint", f"http://{server}", "--region", "us-east-1"]
    assert request(server, "PUT", f"/{name}/other.txt", b"of the operator")[0] == 200
    tiers = [ObjectTier(place, space, SECRET.encode()) for space in (SPACE, OTHER)]
    keys, _ = filled(tiers[0], 5), filled(tiers[1], 2)
    rows = as_json(capsys, "ls", *flags)["namespaces"]
    assert {row["namespace"]: row["objects"] for row in rows} == {SPACE.hex: 5, OTHER.hex: 2}
    assert {row["factors"]["tp_rank"] for row in rows} == {0, 1}
    large = new_key()
    assert tiers[1].store(large, payload_of(large, 5 << 20)).outcome is StoreOutcome.STORED
    assert as_json(capsys, "verify", *flags)["places"][0]["sound"] == 8

    path = f"/{name}/kvferry/{SPACE.hex}/{keys[2].hex()}"
    status, stored = request(server, "GET", path)
    assert status == 200
    assert request(server, "PUT", path, stored[:-1] + bytes([stored[-1] ^ 1]))[0] == 200
    (found,) = as_json(capsys, "verify", *flags, "--remove", code=1)["places"]
    assert [each["name"] for each in found["objects"]] == [keys[2].hex()]
    assert (found["damaged"], found["removed"]) == (1, 1)
    assert tiers[0].find(keys) == [True, True, False, True, True]

    printed(capsys, "clear", *flags, "--namespace", OTHER.hex, "--yes")
    assert [row["namespace"] for row in as_json(capsys, "ls", *flags)["namespaces"]] == [SPACE.hex]
    printed(capsys, "clear", *flags, "--yes")
    assert as_json(capsys, "ls", *flags)["namespaces"] == []
    assert request(server, "GET", f"/{name}/other.txt") == (200, b"of the operator")
    for tier in tiers:
        tier.close()


def test_a_store_that_does_not_answer_is_one_sentence(
    bucket: tuple[str, Bucket], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--object", bucket[0], "--endpoint", "http://127.0.0.1:1", "--region", "us-east-1"]
    assert main(["store", "ls", *flags]) == 1
    assert capsys.readouterr().err == "kvferry: the object store cannot be reached\n"
