"""The faults of a router chaos run: kind, instance and time, drawn from a seed. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.plan import LEASE_S

MEAN_PAUSE_BETWEEN_S = 2.5
QUIET_END_S = 5.0


class FaultKind(StrEnum):
    KILL_PREFILL = "prefill killed, restarted at its address"
    KILL_DECODE = "decode killed, restarted at its address"
    PAUSE = "engine stopped for a moment"
    HANG = "engine hangs, its processes live"
    DRAIN = "engine drained, removed and added again"
    REPLACE = "engine drained, ended, and another added at another address"


WEIGHTS = {
    FaultKind.KILL_PREFILL: 3,
    FaultKind.KILL_DECODE: 3,
    FaultKind.PAUSE: 4,
    FaultKind.HANG: 2,
    FaultKind.DRAIN: 3,
    FaultKind.REPLACE: 1,
}
LENGTHS_S = {FaultKind.PAUSE: (0.3, 3.0), FaultKind.HANG: (0.5 * LEASE_S, 4 * LEASE_S)}
"""Below the time limits of the router: neither ends a stream."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    at_s: float
    fault_kind: FaultKind
    target: str
    length_s: float = 0.0


def make_plan(
    seed: int,
    duration_s: float,
    prefill: Sequence[str],
    decode: Sequence[str],
    leased: Sequence[str],
) -> list[PlannedFault]:
    """Plan one fault of each kind first, then random ones. Instances in `leased` registered
    themselves and would do so again, so the plan never drains or replaces them.
    """
    rng = random.Random(f"router plan {seed}")
    anybody = [*prefill, *decode]
    added = [name for name in anybody if name not in leased]
    targets = {
        FaultKind.KILL_PREFILL: prefill,
        FaultKind.KILL_DECODE: decode,
        FaultKind.PAUSE: anybody,
        FaultKind.HANG: anybody,
        FaultKind.DRAIN: added,
        FaultKind.REPLACE: added,
    }
    ahead = rng.sample(list(FaultKind), len(FaultKind))
    acts, at_s = [], 1.0
    while at_s < duration_s - QUIET_END_S:
        fault_kind = ahead.pop() if ahead else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        length_s = rng.uniform(*LENGTHS_S.get(fault_kind, (0.0, 0.0)))
        acts.append(PlannedFault(at_s, fault_kind, rng.choice(list(targets[fault_kind])), length_s))
        at_s += rng.expovariate(1 / MEAN_PAUSE_BETWEEN_S)
    return acts
