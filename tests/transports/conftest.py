"""Fixtures with two tcp transports in this process; the memory of `far` is filled with sevens."""

from collections.abc import Iterator

import pytest
from tests.transports.tcp_peers import Memory, memory


@pytest.fixture
def near() -> Iterator[Memory]:
    with memory() as made:
        yield made


@pytest.fixture
def far() -> Iterator[Memory]:
    with memory(fill=7) as made:
        yield made
