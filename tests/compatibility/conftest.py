"""What all tests here find out goes onto one page."""

import pytest
from tests.compatibility.table import Outcomes


@pytest.fixture(scope="session")
def outcomes() -> Outcomes:
    return Outcomes()
