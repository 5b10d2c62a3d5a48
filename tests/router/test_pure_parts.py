"""The router's decisions reach nothing outside: time and chance are passed in. `admission.py` has a
shell for the event loop in it.
"""

from pathlib import Path

import pytest
from tests.test_purity import impurities

import kvferry.router

ROUTER = Path(kvferry.router.__file__).parent


@pytest.mark.parametrize(
    "name", ["conversations", "fleet", "health", "instances", "members", "policies", "prefix_index"]
)
def test_the_parts_that_decide_are_pure(name: str) -> None:
    found = impurities((ROUTER / f"{name}.py").read_text(encoding="utf-8"))
    # It takes addresses apart and asks nobody.
    assert [
        module
        for module in found
        if not module.startswith("kvferry.router.") and module not in ("ipaddress", "urllib.parse")
    ] == []


def test_only_the_event_loop_is_in_admission() -> None:
    assert impurities((ROUTER / "admission.py").read_text(encoding="utf-8")) == ["asyncio"]
