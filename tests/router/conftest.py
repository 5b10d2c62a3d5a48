import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _nothing_unhandled(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing a client or an instance does is a traceback in the log."""
    yield
    assert [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR
    ] == []
