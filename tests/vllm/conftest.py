"""One generated model for all tests with real vLLM, and servers that several tests share, because
starting a server takes most of a minute.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.harness import Engine
from tests.vllm.documented import documented
from tests.vllm.fleet import PYTHON, Fleet, ready
from tests.vllm.right import Right, ask_plain

from kvferry.engine.make_model.writer import make_model

# These tests need vLLM's Python interpreter: see test_inside.py.
collect_ignore = ["inside"]


@dataclass(frozen=True)
class Trio:
    """P, D (failure policy `fail`) and kvferry's router in front of them, configured as
    documented.
    """

    fleet: Fleet
    p: Engine
    d: Engine
    router: Engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not PYTHON.exists():
        pytest.skip("vLLM is not installed here; make setup-vllm does it")
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory)
    return directory


@pytest.fixture(scope="session")
def right(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Right:
    with Fleet(tmp_path_factory.mktemp("right"), model) as fleet:
        return ask_plain(fleet)


@pytest.fixture(scope="session")
def trio(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Trio]:
    for_p, for_d, _ = documented("On one host")
    # vLLM then serves the pages that replace weights and reset caches, and stores responses.
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    # It then has the route that takes token ids, and lets a client name a tool to call.
    flags = ("--enable-scale-out", "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with Fleet(tmp_path_factory.mktemp("trio"), model) as fleet:
        p, d = (
            fleet.vllm("prefill", *flags, transfer=for_p.transfer, environment=dev_mode),
            fleet.vllm("decode", *flags, transfer=for_d.transfer, cores="1", environment=dev_mode),
        )
        router = fleet.kvferry_router([p], [d])
        ready(p, d, router)
        yield Trio(fleet, p, d, router)
