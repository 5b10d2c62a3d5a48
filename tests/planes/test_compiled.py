"""Each compiled loop stands on its own: what an earlier build has not is replaced, and named."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.planes import compiled
from kvferry.planes.compiled import COMPILED, compiled_or, missing_loops

MODULE = "kvferry.planes._copy"


def test_nothing_is_missing_where_there_is_a_compiler() -> None:
    pytest.importorskip(MODULE, reason="kvferry was installed without a compiler")
    assert missing_loops() == ()
    assert compiled_or("copy_runs", None) is sys.modules[MODULE].copy_runs


def test_what_an_earlier_build_has_not_is_replaced_and_the_rest_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = ModuleType("of an earlier build")
    vars(earlier)["copy_runs"] = "compiled"
    monkeypatch.setitem(sys.modules, MODULE, earlier)
    assert missing_loops() == tuple(name for name in COMPILED if name != "copy_runs")
    assert [compiled_or(name, "plain") for name in ("copy_runs", "linger")] == ["compiled", "plain"]


def test_without_a_compiler_all_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)  # as where it cannot be imported
    assert missing_loops() == COMPILED
    assert compiled_or("copy_runs", "plain") == "plain"


def test_every_loop_of_the_source_is_one_that_may_be_missing() -> None:
    stub = Path(compiled.__file__).with_name("_copy.pyi").read_text()
    assert {part.split("(")[0] for part in stub.split("def ")[1:]} == set(COMPILED)
