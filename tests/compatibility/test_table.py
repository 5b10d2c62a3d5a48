"""Tests that docs/compatibility.md shows the outcomes of this folder's tests; runs after them."""

import os

import pytest
from tests.compatibility.hybrids import HEADING, hybrid_section
from tests.compatibility.table import PAGE, Outcomes, page
from tests.compatibility.test_product import FAMILIES, FORMS, TRANSPORTS

pytestmark = pytest.mark.slow


@pytest.mark.exhaustive
def test_the_page_says_what_came_out(outcomes: Outcomes) -> None:
    is_whole = len(outcomes.pairs) == len(FAMILIES) * len(TRANSPORTS) and all(
        len(each) == len(FORMS) ** 2 for each in outcomes.pairs.values()
    )
    if not is_whole or not outcomes.refusals:
        pytest.skip("only a run of all of tests/compatibility knows the whole table")
    if os.environ.get("KVFERRY_WRITE_COMPATIBILITY"):
        PAGE.write_text(f"{page(outcomes)}\n{hybrid_section()}")
    assert PAGE.read_text().partition(f"\n{HEADING}")[0] == page(outcomes), (
        "write docs/compatibility.md anew with make compatibility"
    )


def test_a_pair_that_was_refused_or_not_run_is_not_shown_as_good() -> None:
    found = Outcomes()
    good, bad = FORMS[0], FORMS[1]
    for p, d, refusal in (
        (good, good, ""),
        (bad, good, ""),
        (good, bad, "refused: its layout"),
        (bad, bad, ""),
    ):
        found.add("GQA", "shm", p, d, refusal)
    assert f"| **{good.shape}** | yes | refused: its layout |" in page(found)
    del found.pairs["GQA", "shm"][bad, bad]
    assert f"| **{bad.shape}** | yes | not run |" in page(found)
