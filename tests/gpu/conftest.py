"""Fixtures of the GPU tests: one generated model for all of them."""

from pathlib import Path

import pytest

from kvferry.engine.make_model.writer import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_model(directory)
    return directory
