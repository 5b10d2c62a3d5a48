"""Collects the outcomes of all tests in this folder for one page."""

import pytest
from tests.compatibility.table import Outcomes


@pytest.fixture(scope="session")
def outcomes() -> Outcomes:
    return Outcomes()
