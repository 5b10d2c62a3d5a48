from collections.abc import Iterator

import pytest
from tests.dashboard.browser import MISSING, find_browser, start_browser


@pytest.fixture(scope="session")
def browser() -> Iterator[int]:
    """The DevTools port of a real browser."""
    if find_browser() is None:
        pytest.skip(MISSING)
    with start_browser() as port:
        yield port
