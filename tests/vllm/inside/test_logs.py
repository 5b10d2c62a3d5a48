"""kvferry's log lines inside vLLM: vLLM's handlers write them."""

import io
import logging
from collections.abc import Iterator

import pytest

from kvferry.vllm.connector import log_with_vllm


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What vLLM's handlers write; the loggers are as before afterwards."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.Formatter("vllm: %(levelname)s %(message)s"))
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(theirs, "handlers", [handler])
    before = ours.level, ours.propagate, theirs.level
    # pytest adds its own handlers to loggers that do not propagate.
    ours.propagate = True
    theirs.setLevel(logging.INFO)
    yield out
    ours.setLevel(before[0])
    ours.propagate = before[1]
    theirs.setLevel(before[2])


def test_lines_have_the_format_and_the_level_of_vllm(written: io.StringIO) -> None:
    log_with_vllm()
    log_with_vllm()
    log = logging.getLogger("kvferry.connectors.nixl.worker")
    log.debug("not shown")
    log.info("peer connected peer=%s", "a\nb")
    log.warning("load failed request=%s", 1)
    log.warning("load failed request=%s", 2)
    assert written.getvalue().splitlines() == [
        "vllm: INFO peer connected peer=a\\nb",
        "vllm: WARNING load failed request=1",
    ]


def test_a_variable_sets_the_level(written: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LOG_LEVEL", "debug")
    log_with_vllm()
    logging.getLogger("kvferry.connectors.nixl.worker").debug("shown")
    assert written.getvalue() == "vllm: DEBUG shown\n"
