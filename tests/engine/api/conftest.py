import json
from pathlib import Path

import pytest

from kvferry.engine.make_model.tokenizer import CHAT_TEMPLATE, make_tokenizer_json
from kvferry.engine.make_model.writer import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer files of a checkpoint, which are all that the front-end reads."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "tokenizer.json").write_text(make_tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete generated checkpoint, for a real core."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_model(folder)
    return folder
