"""What is done to which member of a router's fleet and when, from a seed. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Act", "Deed", "make_plan"]

MEAN_PAUSE_BETWEEN_S = 2.5
QUIET_END_S = 5.0
PAUSE_S = (0.3, 3.0)
"""Well below every timeout of the router's: nobody's stream ends by it."""


class Deed(StrEnum):
    KILL_PREFILL = "prefill killed, restarted at its address"
    KILL_DECODE = "decode killed, restarted at its address"
    PAUSE = "engine stopped for a moment"
    DRAIN = "engine drained, removed and added again"
    REPLACE = "engine drained, ended, and another added at another address"


WEIGHTS = {Deed.KILL_PREFILL: 3, Deed.KILL_DECODE: 3, Deed.PAUSE: 4, Deed.DRAIN: 3, Deed.REPLACE: 1}


@dataclass(frozen=True, slots=True)
class Act:
    at_s: float
    deed: Deed
    target: str
    length_s: float = 0.0


def make_plan(seed: int, duration_s: float, prefill: Sequence[str], decode: Sequence[str], leased: Sequence[str]) -> list[Act]:
    """One of each deed first, then at random. `leased`: they registered themselves, and would again, so that nobody removes them."""
    rng = random.Random(f"router plan {seed}")
    anybody = [*prefill, *decode]
    added = [name for name in anybody if name not in leased]
    targets = {Deed.KILL_PREFILL: prefill, Deed.KILL_DECODE: decode, Deed.PAUSE: anybody, Deed.DRAIN: added, Deed.REPLACE: added}
    ahead = rng.sample(list(Deed), len(Deed))
    acts, at_s = [], 1.0
    while at_s < duration_s - QUIET_END_S:
        deed = ahead.pop() if ahead else rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        length_s = rng.uniform(*PAUSE_S) if deed is Deed.PAUSE else 0.0
        acts.append(Act(at_s, deed, rng.choice(list(targets[deed])), length_s))
        at_s += rng.expovariate(1 / MEAN_PAUSE_BETWEEN_S)
    return acts
