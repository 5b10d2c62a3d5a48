"""Tests that the stopwatch times the engine's calls to a connector and changes nothing else. The
tests need no vLLM, because any class can stand in for the connector.
"""

import json
import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from benchmarks import vllm_stopwatch as stopwatch


class Role(Enum):
    WORKER = 1


class Interface:
    """Stands in for an interface that vLLM checks with isinstance."""


class Connector(Interface):
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self.ended = 0
        self.made_of = (vllm_config, role, self.outer(1), kv_cache_config)

    @classmethod
    def layout(cls) -> str:
        return cls.__name__

    @property
    def is_ready(self) -> bool:
        return True

    def outer(self, number: int, *, scale: int = 1) -> int:
        """Doubles."""
        return self.inner(number) * scale

    def inner(self, number: int) -> int:
        return number * 2

    def fails(self) -> None:
        raise LookupError

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture
def connector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv(stopwatch.DIRECTORY_VARIABLE, str(tmp_path))
    made = stopwatch.timed_class(Connector)("config", Role.WORKER, kv_cache_config="cache")
    yield made
    made.shutdown()


def written(directory: Path) -> dict[str, Any]:
    (path,) = directory.glob("worker-*.json")
    totals: dict[str, Any] = json.loads(path.read_text())
    return totals


def test_it_is_still_the_same_connector(connector: Any) -> None:
    assert isinstance(connector, Connector)
    assert isinstance(connector, Interface)
    assert connector.made_of == ("config", Role.WORKER, 2, "cache")
    assert (connector.layout(), connector.is_ready) == ("Connector", True)
    assert connector.outer(2, scale=3) == 12
    assert type(connector).outer.__doc__ == "Doubles."


def test_every_call_is_counted_and_nested_ones_once(connector: Any, tmp_path: Path) -> None:
    for number in range(3):
        connector.outer(number)
    connector.inner(1)
    with pytest.raises(LookupError):
        connector.fails()
    connector.shutdown()
    totals = written(tmp_path)
    assert {name: method["calls"] for name, method in totals.items()} == {
        "outer": 3,
        "inner": 1,
        "fails": 1,
    }
    assert totals["outer"]["total_s"] >= totals["outer"]["max_s"] > 0
    assert connector.ended == 1


def test_calls_of_other_threads_are_not_the_engines(connector: Any, tmp_path: Path) -> None:
    thread = threading.Thread(target=connector.outer, args=(1,))
    thread.start()
    thread.join()
    connector.shutdown()
    assert written(tmp_path) == {}


def test_vllm_finds_the_timed_class_by_the_connectors_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stopwatch.WRAPS_VARIABLE, f"{__name__}:Connector")
    monkeypatch.setitem(
        __import__("sys").modules,
        __name__,
        __import__("types").SimpleNamespace(Connector=Connector),
    )
    found = stopwatch.Connector
    assert issubclass(found, Connector)
    assert found is stopwatch.Connector
    with pytest.raises(AttributeError):
        _ = stopwatch.Other
