"""Fixtures of the tests of connectors."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.connectors.offloading_side import Side, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    sides: list[Side] = []

    def make(**more: Any) -> Side:
        sides.append(Side(tmp_path, **more))
        return sides[-1]

    yield make
    for side in sides:
        side.close()
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")
    ]
