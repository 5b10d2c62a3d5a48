"""Runs `inside/`, the tests that need vLLM's classes, with the interpreter that has them."""

import os
import subprocess

import pytest
from tests.vllm.fleet import ROOT

from kvferry.vllm.release import TESTED

INSIDE = ROOT / "tests/vllm/inside"
# The newest release, or that of `make test-vllm VLLM_VERSION=…`.
ENVIRONMENT = ROOT / os.environ.get("KVFERRY_TEST_INSIDE_VENV", f".venv-vllm-{TESTED[-1]}")
PYTHON = ENVIRONMENT / "bin" / "python"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(3600)  # over a thousand tests
def test_inside_vllm(pytestconfig: pytest.Config) -> None:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    command = [
        str(PYTHON),
        "-m",
        "pytest",
        "-c",
        str(INSIDE / "pytest.ini"),
        "-q",
        "-p",
        "no:cacheprovider",
        *(["--exhaustive"] if pytestconfig.getoption("--exhaustive") else []),
        str(INSIDE),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:]
