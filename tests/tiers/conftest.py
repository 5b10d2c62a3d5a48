"""A folder in shared memory for the segments of host pools."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tiers.pool_engine import OPENED


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that does not exist yet."""
    parent = Path(tempfile.mkdtemp(prefix="kvferry-test-", dir="/dev/shm"))
    yield parent / "pool"
    while OPENED:
        OPENED.pop().pool.close()
    shutil.rmtree(parent)
