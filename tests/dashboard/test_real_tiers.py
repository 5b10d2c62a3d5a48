"""Tests that the page of a real router shows the storage tiers of real engines behind it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.dashboard.browser import open_page
from tests.dashboard.tiered_fleet import TieredFleet, start_tiered_fleet
from tests.e2e.harness import Prompt, ask_all

pytestmark = pytest.mark.slow

PREFIX = tuple(10 + (7 * n) % 480 for n in range(800))
TIERS = """[...document.querySelectorAll('#tiers tbody tr')].map(row =>
  [...row.children].map(cell => cell.textContent))"""


def test_hit_rate_and_fill_follow_prompts_with_a_shared_prefix(
    browser: int, tmp_path: Path
) -> None:
    # Without a prefix cache of its own, P takes every prefix that it has seen from a tier.
    flag = "--no-enable-prefix-caching"
    with start_tiered_fleet(tmp_path, flag, probe_interval_s=0.5) as fleet:
        asyncio.run(look_at_tiers(browser, fleet))


async def look_at_tiers(browser: int, fleet: TieredFleet) -> None:
    async def ask(last: int, prefix: tuple[int, ...] = PREFIX) -> None:
        (answer,) = await ask_all(fleet.router, [Prompt((*prefix, 500 + last), max_tokens=2)])
        assert answer.is_ok, answer.body

    async with open_page(browser) as page:

        async def until_tiers(is_right: Any) -> Any:
            return await page.until(TIERS, lambda found: len(found) == 2 and is_right(*found))

        await page.open(fleet.link)
        await ask(1)
        # D has no tiers, so all rows are P's. The first prompt is stored and found nowhere.
        cpu, disk = await until_tiers(
            lambda cpu, disk: cpu[1].startswith("0 %") and not disk[1].startswith("0 %0 B")
        )
        assert cpu[0] == f"{fleet.prefillers[0].url}prefill"
        assert (cpu[2], disk[0]) == ("cpu", "disk")
        assert cpu[3].endswith("of 24 MiB")
        assert disk[1].endswith("of 128 MiB")
        for last in range(2, 6):
            await ask(last)
        # Four of five prompts found the prefix, all of it in the faster tier.
        cpu, disk = await until_tiers(lambda cpu, disk: cpu[6] == "100 %" and hits(cpu) > 70)
        assert disk[4] == "0 %"
        # Another prefix is stored beside the first.
        num_chunks = int(cpu[4])
        await ask(1, PREFIX[::-1])
        await until_tiers(lambda cpu, disk: int(cpu[4]) == int(disk[2]) == 2 * num_chunks)
        assert page.problems == []


def hits(row: list[str]) -> float:
    return float(row[1].partition(" %")[0])
