"""One instance as the fleet knows it: what it does for this router and how it has been doing.

Pure. Owned by the `Fleet`; others read.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from kvferry.router.fleet.health import Breaker, BreakerPhase
from kvferry.router.fleet.instances import Instance, Outcome, Role

__all__ = ["Leg", "LegHistory", "Member", "MemberState", "RoutingHints", "leg_weight"]

_PREFILL_BASE = 1024
"""What a prefill costs however short it is, in bytes of prompt."""


class MemberState(StrEnum):
    NEW = "new"
    """Nobody has heard of it yet. It is given legs like a healthy one."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It fails, but it is the last one of a role that has to answer."""
    RESTING = "resting"
    """It answered 503 a moment ago: full, or about to end."""
    HALF_OPEN = "half_open"
    EJECTED = "ejected"
    DRAINING = "draining"


@dataclass(slots=True)
class RoutingHints:
    """What a policy may look at."""

    prompt: bytes | memoryview = b""
    """The raw JSON text of the prompt or of the messages."""
    conversation: Instance | None = None
    """Who served this conversation's last turn, in the role that is asked for."""
    prefix_hashes: list[int] | None = None
    """Of the prompt's beginnings; kept here by the policy that needed them, so that they are made
    once.
    """


def leg_weight(role: Role, prompt_bytes: int) -> int:
    """Load that a leg is. A prefill takes as long as its prompt is; decodes are batched, so each is
    one. Whole numbers: what is added and taken away leaves nothing behind.
    """
    return _PREFILL_BASE + prompt_bytes if role is Role.PREFILL else 1


@dataclass(slots=True)
class LegHistory:
    """How a member's legs have ended, for those who look at the fleet."""

    counts: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(Outcome, 0))
    last_outcome: Outcome | None = None
    last_error: str = ""
    last_error_at: float | None = None

    def note_outcome(self, outcome: Outcome) -> None:
        self.counts[outcome] += 1
        if outcome is not Outcome.ABANDONED:
            self.last_outcome = outcome

    def note_error(self, error: str, now: float) -> None:
        self.last_error, self.last_error_at = error, now


@dataclass(slots=True, eq=False)
class Member:
    instance: Instance
    breaker: Breaker
    lease_until: float = inf
    """A member that registered itself goes unless it renews. Others stay."""
    is_draining: bool = False
    has_left: bool = False
    """It drains by its own word, not an operator's: when it registers again, that is over."""
    ready_at: float = -inf
    """When it may be given a leg, as things stand: `update_ready_at` after any of them changed.
    Every choice reads it for every member.
    """
    load: int = 0
    num_running: int = 0
    last_chosen: int = 0
    """When it was last chosen or given a leg, counted over the whole fleet."""
    incarnation: int = 0
    """Grows when it restarts: what it had cached is gone."""
    probe_at: float = -inf
    record: LegHistory = field(default_factory=LegHistory)

    @property
    def is_static(self) -> bool:
        return self.lease_until == inf

    def state(self, now: float) -> MemberState:
        if self.is_draining:
            return MemberState.DRAINING
        phase = self.breaker.phase_at(now)
        if phase is not BreakerPhase.CLOSED:
            return MemberState.EJECTED if phase is BreakerPhase.EJECTED else MemberState.HALF_OPEN
        if now < self.breaker.cooldown_until:
            return MemberState.RESTING
        if self.breaker.is_suspect:
            return MemberState.SUSPECT
        return MemberState.HEALTHY if self.breaker.is_reached else MemberState.NEW

    def is_usable(self, now: float) -> bool:
        """A request that is sent to it now can be served, as far as anybody has seen."""
        return (
            self.state(now) not in (MemberState.EJECTED, MemberState.DRAINING)
            and self.breaker.is_reachable
        )

    def update_ready_at(self) -> None:
        self.ready_at = (
            inf if self.is_draining else max(self.breaker.not_before, self.breaker.cooldown_until)
        )


@dataclass(slots=True, eq=False)
class Leg:
    """A request under way at a member, which may have been removed in the meantime. Ended once."""

    member: Member
    weight: int
    is_trial: bool
    generation: int
    """Of the member's breaker, when the leg began."""
    incarnation: int
    """Of the member, then."""
    is_answered: bool = False
    is_over: bool = False

    @property
    def instance(self) -> Instance:
        return self.member.instance
