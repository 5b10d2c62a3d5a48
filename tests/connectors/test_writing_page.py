"""Runs the connector that docs/writing-a-connector.md shows, as it stands there."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.connectors.test_example import OTHER_BLOCKS, TOKENS, Side

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-connector.md"
MAX_LINES = 120
"""Without blank lines, so that a newcomer reads the connector in one sitting."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the connector's files, after Python can import the connector."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    code = found.group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= MAX_LINES
    (tmp_path / "my_store.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    folder = tmp_path / "blocks"
    folder.mkdir()
    yield folder
    sys.modules.pop("my_store", None)


def side(folder: Path, tp_size: int = 1) -> Side:
    return Side(
        folder,
        tp_size=tp_size,
        connector={
            "kv_connector": "FolderConnector",
            "kv_connector_module_path": "my_store",
            "kv_connector_extra_config": {"folder": str(folder)},
        },
    )


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_connector_of_the_page_loads_what_another_engine_has_saved(
    start: Path, tp_size: int
) -> None:
    p, d = side(start, tp_size), side(start, tp_size)
    p.prefill(TOKENS)
    num_blocks = (len(TOKENS) - 1) // p.cache.block_size
    assert len(list(start.iterdir())) == num_blocks * tp_size
    assert d.load() == num_blocks * p.cache.block_size
    assert all(d.has(TOKENS, index, OTHER_BLOCKS[index]) for index in range(num_blocks))
    other = [7, *TOKENS[1:]]
    assert d.load(other, "other prompt") == 0


def test_a_file_that_has_gone_is_reported_and_its_step_saves_nothing(start: Path) -> None:
    p, d = side(start), side(start)
    p.prefill(TOKENS)
    files = sorted(start.iterdir())
    files[0].write_bytes(b"damaged")
    assert d.load() == 0
    assert sorted(start.iterdir()) == files
    assert files[0].read_bytes() == b"damaged"
