"""Checks that both kinds of chaos run make at the end, and their progress output."""

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping

import aiohttp
import psutil
from tests.e2e.harness import QUIET, Engine, is_alive, metrics, new_session, until

SETTLE_S = 60.0
PROGRESS_S = 5.0
LEVELS = (
    "kvferry:num_leases",
    "kvferry:num_held_blocks",
    "kvferry:num_transfers",
    "kvferry:num_registrations",
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def busy(engines: Mapping[str, Engine]) -> dict[str, dict[str, float]]:
    """Return what each engine still holds or waits for; an idle engine has an empty dict."""
    async with new_session() as session:
        return {
            name: {
                key: value
                for key, value in (await metrics(session, engine)).items()
                if key in (*QUIET, *LEVELS) and value
            }
            for name, engine in engines.items()
        }


async def expect(
    what: str,
    condition: Callable[[], Awaitable[bool]],
    state: Callable[[], Awaitable[dict[str, dict[str, float]]]],
    violations: list[str],
) -> None:
    """Wait until the condition holds; after `SETTLE_S` add the engines' state to `violations`."""
    try:
        await until(what, condition, SETTLE_S)
    except AssertionError as error:
        violations.append(f"{error}: {await state()}")
    except aiohttp.ClientError as error:
        violations.append(f"an engine does not answer: {error}")


def family_of(engines: Iterable[Engine]) -> list[psutil.Process]:
    return [process for engine in engines for process in engine.family()]


def left_behind(family: Iterable[psutil.Process]) -> list[str]:
    return [f"process {process.pid} was left behind" for process in family if is_alive(process)]
