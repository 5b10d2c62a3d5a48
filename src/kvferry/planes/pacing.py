"""Work cut into turns of about a millisecond, so that no message waits for it."""

from collections.abc import Iterable, Iterator

__all__ = ["run_in_ticks"]


def run_in_ticks(costs: Iterable[int], tick_cost: int) -> Iterator[float]:
    """Take steps of the work, each of which says what it has cost, and pause when they come to `tick_cost`. The last turn has no pause:
    short work is over in one. Yields how long to pause, in seconds: not at all, but others have their turn."""
    spent = 0
    for cost in costs:
        spent += cost
        if spent >= tick_cost:
            yield 0.0
            spent = 0
