import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_unhandled(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client or an instance does may log an error."""
    yield
    assert [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR
    ] == []
