"""The faults of a chaos run: kind, target and time, drawn from a seed. Pure: the same seed and
arguments give the same plan.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

LEASE_S = 3.0
MEAN_PAUSE_BETWEEN_S = 3.0
QUIET_END_S = 5.0
"""No fault starts in these last seconds, so most faults are over at the end."""


class Kind(StrEnum):
    KILL_PREFILL = "prefill killed, restarted"
    KILL_DECODE = "decode killed, restarted"
    KILL_ROUTER = "router killed, restarted"
    SHORT_PAUSE = "engine stopped, shorter than its lease"
    LONG_PAUSE = "engine stopped, longer than its lease"
    HANG = "engine hangs, its processes live"
    SHORT_CUT = "cable cut, shorter than a lease"
    LONG_CUT = "cable cut, longer than a lease"


WEIGHTS = {
    Kind.KILL_PREFILL: 2,
    Kind.KILL_DECODE: 2,
    Kind.KILL_ROUTER: 1,
    Kind.SHORT_PAUSE: 6,
    Kind.LONG_PAUSE: 3,
    Kind.HANG: 3,
    Kind.SHORT_CUT: 6,
    Kind.LONG_CUT: 4,
}
LENGTHS_S = {
    Kind.SHORT_PAUSE: (0.1, 0.6 * LEASE_S),
    Kind.LONG_PAUSE: (1.2 * LEASE_S, 2.5 * LEASE_S),
    Kind.HANG: (1.2 * LEASE_S, 4 * LEASE_S),
    Kind.SHORT_CUT: (0.1, 0.6 * LEASE_S),
    Kind.LONG_CUT: (1.2 * LEASE_S, 4 * LEASE_S),
}


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: Kind
    target: str
    """Name of an engine, or of the router."""
    length_s: float = 0.0
    """Duration of a fault that is undone afterwards (a pause, a hang or a cut)."""


def make_plan(
    seed: int, duration_s: float, prefill: Sequence[str], decode: Sequence[str], router: str
) -> list[Fault]:
    """Plan one fault of each kind first, in random order, so that even a short run contains all
    kinds if it is long enough; after that, random faults.
    """
    rng = random.Random(f"plan {seed}")
    targets = {
        Kind.KILL_PREFILL: list(prefill),
        Kind.KILL_DECODE: list(decode),
        Kind.KILL_ROUTER: [router],
    }
    ahead = rng.sample(list(Kind), len(Kind))
    planned_faults = []
    at_s = 1.0
    while at_s < duration_s - QUIET_END_S:
        kind = ahead.pop() if ahead else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        target = rng.choice(targets.get(kind, [*prefill, *decode]))
        length_s = rng.uniform(*LENGTHS_S[kind]) if kind in LENGTHS_S else 0.0
        planned_faults.append(Fault(at_s, kind, target, length_s))
        at_s += rng.expovariate(1 / MEAN_PAUSE_BETWEEN_S)
    return planned_faults
