"""Pytest settings for all tests.

Hypothesis has no deadline: on a busy machine a slow example says nothing about the code.

Tests marked `exhaustive` run with `--exhaustive` only (`make test-all`).

With pytest-xdist, each worker process takes one file at a time. vLLM tests come first, then tests
marked `slow`, so that all workers finish at about the same time. All tests with real vLLM count as
one file: vLLM servers need much memory, and several files share some servers.
"""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tests.sampling import leave_out_exhaustive
from tests.stall_watchdog import StallWatchdog, run_test
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("kvferry", deadline=None)
settings.load_profile("kvferry")
WATCHDOG = StallWatchdog()


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        is_vllm = file.startswith("tests/vllm/") or "real_vllm" in file
        return "vllm" if is_vllm else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    run_test(item, nextitem, WATCHDOG, lambda words: print(words, file=sys.__stderr__))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive", action="store_true", help="also run the tests marked exhaustive"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_out_exhaustive(config, items)
    items.sort(key=_turn)


@pytest.fixture
def no_thread_switches() -> Iterator[None]:
    """The interpreter forces no thread switch in this test: a thread keeps the GIL until it
    releases it.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(30.0)
    yield
    sys.setswitchinterval(before)


def _turn(item: pytest.Item) -> int:
    return 0 if item.get_closest_marker("vllm") else 1 if item.get_closest_marker("slow") else 2
