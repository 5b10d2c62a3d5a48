"""Fixtures for tests that import vLLM; without vLLM, no test here is collected. See
tests/vllm/test_inside.py.
"""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.sampling import leave_out_exhaustive

if TYPE_CHECKING:
    from tests.vllm.inside.engines import Engine

collect_ignore_glob = [] if find_spec("vllm") is not None else ["*.py"]

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "KVFERRY_SECRET": "a secret for tests, shared by both sides",
    "KVFERRY_SIDE_CHANNEL_PORT": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # vLLM without compiled code does not know its device.
    "VLLM_TARGET_DEVICE": "cpu",
}

StartEngine = Callable[..., "Engine"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="also run the tests marked exhaustive"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A connection between two NIXL agents takes UCX 0.15 s of computing, more than most tests of
    # pull. Tests of push, all tests with real servers, and `make test-all` move KV with NIXL.
    if not config.getoption("--exhaustive"):
        os.environ["KVFERRY_TEST_PULL_WITHOUT_NIXL"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_exhaustive(config, items)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny checkpoint; also sets up this process as a vLLM worker process."""
    from tests.vllm.inside.engines import start_parallel_state

    from kvferry.engine.make_model.writer import make_model

    directory = tmp_path_factory.mktemp("inside")
    make_model(directory / "tiny")
    start_parallel_state(directory)
    return directory / "tiny"


@pytest.fixture
def start_engine(model: Path) -> Iterator[StartEngine]:
    """Starts engines with vLLM's scheduler and our connector; closes them at the end."""
    from tests.vllm.inside.engines import Engine

    engines: list[Engine] = []

    def start(name: str, **settings: Any) -> Engine:
        engines.append(Engine(model, name, **settings))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(start_engine: StartEngine) -> tuple["Engine", "Engine"]:
    return start_engine("p"), start_engine("d")
