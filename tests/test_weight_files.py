"""Tests that weight files have equal digests if and only if all their bytes are equal, and that a
digest is computed again whenever a file may have changed.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvferry.engine.make_model.writer import make_model
from kvferry.errors import ConfigError
from kvferry.weight_files import digest_files

YEAR_NS = 365 * 24 * 3600 * 10**9


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def records(environ: Mapping[str, str]) -> list[Path]:
    return sorted(Path(environ["XDG_CACHE_HOME"], "kvferry", "weights").iterdir())


def write_old(path: Path, content: bytes) -> Path:
    """Write a file whose times are old enough for the result to be kept, as far as a test can set
    them: the time of the last change of the inode is now.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(YEAR_NS, YEAR_NS))
    return path


def test_40_changed_rows_of_4096_are_other_weights(tmp_path: Path, environ: dict[str, str]) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((4096, 256), np.float32)
    save_file({"embed": rows}, tmp_path / "a.safetensors")
    rows[generator.choice(4096, 40, replace=False)] += 1
    save_file({"embed": rows}, tmp_path / "b.safetensors")
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    a, b, c = (digest_files([tmp_path / f"{name}.safetensors"], environ) for name in "abc")
    assert a == c != b


@pytest.mark.parametrize("at", [0, 8, 1 << 20, -1])
def test_one_byte_anywhere_is_enough_to_differ(
    tmp_path: Path, environ: dict[str, str], at: int
) -> None:
    content = bytearray(os.urandom((9 << 20) + 7))
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    before = digest_files([path], environ)
    content[at] ^= 1
    path.write_bytes(content)
    assert digest_files([path], environ) != before


def test_the_order_of_files_counts_and_names_do_not(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "copy").write_bytes(b"a")
    a, b, copy = (tmp_path / name for name in ("a", "b", "copy"))
    assert digest_files([a, b], environ) == digest_files([copy, b], environ)
    assert digest_files([a, b], environ) != digest_files([b, a], environ)


def test_an_earlier_result_is_used_while_the_file_is_the_same(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """A record with another digest shows that the record was read."""
    path = write_old(tmp_path / "model.bin", b"weights")
    digest_files([path], environ)
    found = path.stat()
    kept: dict[str, int | str] = {
        "device": found.st_dev,
        "inode": found.st_ino,
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "sha256": "a" * 64,
    }
    (record,) = records(environ)
    expected = hashlib.blake2b(b"a" * 64, digest_size=16).hexdigest()
    record.write_text(json.dumps(kept))
    assert digest_files([path], environ) == expected
    for name in ("device", "inode", "size", "mtime_ns", "ctime_ns"):
        record.write_text(json.dumps({**kept, name: 1}))
        assert digest_files([path], environ) != expected, name


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: record.write_bytes(b""),
        lambda record: record.write_bytes(b"{" * 1000),
        lambda record: record.write_bytes(os.urandom(4096)),
        lambda record: (record.unlink(), record.mkdir()),
        lambda record: (record.unlink(), record.symlink_to("/dev/full")),
        lambda record: [record.unlink(), subprocess.run(["mkfifo", record], check=True)],
        lambda record: record.chmod(0),
    ],
    ids=["empty", "cut", "noise", "directory", "link", "fifo", "unreadable"],
)
def test_damaged_records_do_no_harm(
    tmp_path: Path, environ: dict[str, str], damage: Callable[[Path], object]
) -> None:
    path = write_old(tmp_path / "model.bin", b"weights")
    right = digest_files([path], environ)
    damage(*records(environ))
    assert digest_files([path], environ) == right


@pytest.mark.parametrize("base", ["/proc/none", "/dev/null"])
def test_no_cache_folder_means_that_files_are_hashed(tmp_path: Path, base: str) -> None:
    path = write_old(tmp_path / "model.bin", b"weights")
    kept = digest_files([path], {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert digest_files([path], {"XDG_CACHE_HOME": base}) == kept


def hub(folder: Path, content: bytes, blob_name: str) -> Path:
    """A file in the layout of the hub's cache."""
    repository = folder / "models--a--b"
    blob = write_old(repository / "blobs" / blob_name, content)
    link = repository / "snapshots" / "commit" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(Path("..", "..", "blobs", blob.name))
    return link


def test_the_digest_that_the_hubs_cache_states_is_that_of_the_bytes(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    content = b"weights"
    link = hub(tmp_path / "hub", content, hashlib.sha256(content).hexdigest())
    copy = write_old(tmp_path / "copy.safetensors", content)
    stated = digest_files([link], environ)
    assert not records(environ)
    assert stated == digest_files([copy], environ)
    link.resolve().chmod(0)
    assert digest_files([link], environ) == stated


@pytest.mark.parametrize("name", ["0" * 40, "A" * 64, "0" * 63, "0" * 65])
def test_other_names_in_the_hubs_cache_state_nothing(
    tmp_path: Path, environ: dict[str, str], name: str
) -> None:
    copy = write_old(tmp_path / "copy", b"weights")
    link = hub(tmp_path / "hub", b"weights", name)
    assert digest_files([link], environ) == digest_files([copy], environ)


def test_a_link_to_a_name_of_64_digits_elsewhere_states_nothing(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    write_old(tmp_path / "blobs" / ("0" * 64), b"weights")
    link = tmp_path / "model.safetensors"
    link.symlink_to(tmp_path / "blobs" / ("0" * 64))
    copy = write_old(tmp_path / "copy", b"weights")
    assert digest_files([link], environ) == digest_files([copy], environ)


def test_a_missing_file_is_named(tmp_path: Path, environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"weights in .*gone.* cannot be read"):
        digest_files([tmp_path / "gone"], environ)


def test_processes_that_start_together_agree(tmp_path: Path, environ: dict[str, str]) -> None:
    make_model(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    code = (
        "import os, sys; from pathlib import Path; from kvferry.weight_files import digest_files;"
        "print(digest_files([Path(sys.argv[1])], os.environ))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, **environ},
            stdout=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    answers = {process.communicate()[0].decode().strip() for process in processes}
    assert answers == {digest_files([path], environ)}


def test_the_same_tensors_saved_with_other_metadata_are_another_file(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """Files are compared, not tensors: vLLM's connector compares the tensors in memory where it
    can.
    """
    make_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = digest_files([path], environ)
    save_file(load_file(path), path, metadata={"format": "np"})
    assert digest_files([path], environ) != whole
