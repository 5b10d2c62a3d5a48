"""Tests that the router decides in pure code: callers pass in time and randomness.
`serving/admission.py` also has a shell for the event loop.
"""

from pathlib import Path

import pytest
from tests.test_purity import impurities

import kvferry.router

ROUTER = Path(kvferry.router.__file__).parent


@pytest.mark.parametrize(
    "name",
    [
        "conversations/store",
        "fleet/fleet",
        "fleet/health",
        "fleet/instances",
        "fleet/members",
        "fleet/policies",
        "fleet/tier_metrics",
    ],
)
def test_the_parts_that_decide_are_pure(name: str) -> None:
    found = impurities((ROUTER / f"{name}.py").read_text(encoding="utf-8"))
    # Parsing an address touches no network, and the kinds of settings are pure.
    pure = {"ipaddress", "urllib.parse", "kvferry.config.fields"}
    assert [
        module
        for module in found
        if not module.startswith("kvferry.router.") and module not in pure
    ] == []


def test_only_the_event_loop_is_in_admission() -> None:
    assert impurities((ROUTER / "serving" / "admission.py").read_text(encoding="utf-8")) == [
        "asyncio",
        "kvferry.config.fields",
    ]
