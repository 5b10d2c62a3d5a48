"""Tests that each native function which an older build lacks is replaced separately, and reported
by name.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.transports.copy import native as compiled
from kvferry.transports.copy.native import NATIVE_FUNCTIONS, missing_native_functions, native_or

MODULE = "kvferry.transports.copy._copy"


def test_nothing_is_missing_where_there_is_a_compiler() -> None:
    pytest.importorskip(MODULE, reason="kvferry was installed without a compiler")
    assert missing_native_functions() == ()
    assert native_or("copy_segments", None) is sys.modules[MODULE].copy_segments


def test_what_an_earlier_build_has_not_is_replaced_and_the_rest_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    earlier = ModuleType("of an earlier build")
    vars(earlier)["copy_segments"] = "compiled"
    monkeypatch.setitem(sys.modules, MODULE, earlier)
    assert missing_native_functions() == tuple(
        name for name in NATIVE_FUNCTIONS if name != "copy_segments"
    )
    assert [native_or(name, "plain") for name in ("copy_segments", "spin_wait")] == [
        "compiled",
        "plain",
    ]


def test_without_a_compiler_all_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)  # makes the import fail
    assert missing_native_functions() == NATIVE_FUNCTIONS
    assert native_or("copy_segments", "plain") == "plain"


def test_every_loop_of_the_source_is_one_that_may_be_missing() -> None:
    stub = Path(compiled.__file__).with_name("_copy.pyi").read_text()
    assert {part.split("(")[0] for part in stub.split("def ")[1:]} == set(NATIVE_FUNCTIONS)
