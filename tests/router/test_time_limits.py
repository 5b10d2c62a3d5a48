"""Tests the time limit of a request, including the timer that all requests share."""

import asyncio

import pytest

from kvferry.router.http.deadlines import TimeLimit, TimeLimits

FOREVER_S = 3600.0


async def serve(
    limits: TimeLimits,
    limit_s: float,
    work: "asyncio.Future[str]",
    log: list[str],
    begun: list[TimeLimit],
) -> None:
    limit = limits.begin(limit_s)
    begun.append(limit)
    try:
        log.append(await work)
    except asyncio.CancelledError:
        if not limit.end():
            log.append("left")
            raise
        log.append("late")
        await asyncio.sleep(0)  # a late request can still await something: sending its error
        log.append("said so")
    finally:
        limit.end()


def run_one(limit_s: float, *, answer: str = "", leaves: bool = False) -> tuple[list[str], bool]:
    """The logged events, and whether the task ended as cancelled."""

    async def main() -> tuple[list[str], bool]:
        limits, log = TimeLimits(), list[str]()
        work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(limits, limit_s, work, log, []))
        await asyncio.sleep(0)
        if answer:
            work.set_result(answer)
        if leaves:
            task.cancel()
        await asyncio.wait([task], timeout=60)
        limits.close()
        assert task.done()
        assert task.cancelling() == int(leaves)
        return log, task.cancelled()

    return asyncio.run(main())


def test_whoever_is_late_is_told_and_goes_on() -> None:
    assert run_one(0.01) == (["late", "said so"], False)


def test_whoever_is_in_time_hears_nothing() -> None:
    assert run_one(FOREVER_S, answer="done") == (["done"], False)


def test_a_client_that_leaves_is_not_mistaken_for_a_late_request() -> None:
    assert run_one(FOREVER_S, leaves=True) == (["left"], True)


@pytest.mark.parametrize("is_left_first", [True, False])
def test_a_client_that_leaves_at_the_last_moment_has_left(is_left_first: bool) -> None:
    async def main() -> list[str]:
        limits, log, begun = TimeLimits(), list[str](), list[TimeLimit]()
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(serve(limits, FOREVER_S, loop.create_future(), log, begun))
        await asyncio.sleep(0)
        (limit,) = begun
        if is_left_first:
            task.cancel()
        limit.on_deadline(loop.time())
        if not is_left_first:
            task.cancel()
        await asyncio.wait([task], timeout=60)
        limits.close()
        return log

    assert asyncio.run(main()) == ["left"]
