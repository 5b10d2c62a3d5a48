"""Contestants that take turns, and the rows that compare them. The comparison is pure."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from kvferry.bench.figures import ratio, rounded
from kvferry.cli.runtime import StopRequest

TimedCall = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do some work. `prepare` and `clean` are not timed."""

    name: str
    run: TimedCall
    prepare: TimedCall | None = None
    clean: TimedCall | None = None


def take_turns(
    contestants: Sequence[Contestant], num_rounds: int, stop: StopRequest
) -> dict[str, list[float]]:
    """Run all contestants once for warming up and then `num_rounds` times, each round in another
    order, so that other load on the machine affects all of them. Return their times in seconds.
    """
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for turn in range(-1, num_rounds):
        shift = turn % len(contestants)
        for each in [*contestants[shift:], *contestants[:shift]]:
            stop.check()
            if each.prepare is not None:
                each.prepare()
            began = time.perf_counter()
            each.run()
            took = time.perf_counter() - began
            if each.clean is not None:
                each.clean()
            if turn >= 0:
                seconds[each.name].append(took)
    return seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """One kind of work, done by us and by a baseline."""

    part: str
    """memory, disk, object."""
    work: str
    """save, load, store."""
    size_bytes: int
    """The bytes of one segment or object."""
    moved_bytes: int
    """The bytes of one round."""
    seconds: Mapping[str, Sequence[float]]
    """By contestant."""
    ours: str
    baseline: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def gbps(self, name: str) -> float:
        """The median speed in 10^9 bytes per second."""
        return self.moved_bytes / median(self.seconds[name]) / 1e9

    def worst_gbps(self, name: str) -> float:
        return self.moved_bytes / max(self.seconds[name]) / 1e9

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "work": self.work,
            "size_bytes": self.size_bytes,
            "moved_bytes": self.moved_bytes,
            "rounds": len(self.seconds[self.ours]),
            "gbps": rounded(self.gbps(self.ours), 3),
            "worst_gbps": rounded(self.worst_gbps(self.ours), 3),
            "baseline": self.baseline,
            "baseline_gbps": rounded(self.gbps(self.baseline), 3),
            "baseline_worst_gbps": rounded(self.worst_gbps(self.baseline), 3),
            "of_baseline": ratio(self.gbps(self.ours), self.gbps(self.baseline)),
            "others_gbps": {
                name: rounded(self.gbps(name), 3)
                for name in self.seconds
                if name not in (self.ours, self.baseline)
            },
            **self.facts,
        }
