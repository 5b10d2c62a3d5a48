"""One instance as a member of the fleet: state, load and history.

Pure. The `Fleet` owns and changes members; other modules only read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from kvferry.router.fleet.health import Breaker, BreakerPhase
from kvferry.router.fleet.instances import Instance, Outcome, Role

_GRACE_S = 60.0
"""How long a member whose registration has run out stays while it answers probes."""
_PREFILL_BASE = 1024
"""Fixed cost of a prefill, in bytes of prompt."""


class MemberState(StrEnum):
    """State of a member, as shown to operators."""

    NEW = "new"
    """Neither a leg nor a probe was answered yet. A new member is given legs like a healthy one."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """The member fails, but is the last usable member of a role that must answer."""
    COOLDOWN = "cooldown"
    """The member answered 503 a moment ago, because it is full or about to stop."""
    HALF_OPEN = "half_open"
    """The ejection is over; one trial leg decides."""
    EJECTED = "ejected"
    DRAINING = "draining"


@dataclass(slots=True)
class RoutingHints:
    """Properties of a request that a routing policy may use."""

    prompt: bytes | memoryview = b""
    """The raw JSON text of the prompt or of the messages."""
    conversation: Instance | None = None
    """The instance of the requested role that served the conversation's last turn."""
    prefix_hashes: list[int] | None = None
    """Hashes of the prompt's prefixes, cached by the policy."""


def leg_weight(role: Role, prompt_bytes: int) -> int:
    """Load of one leg. The time of a prefill is proportional to its prompt; decode legs are
    batched, so each counts 1. Integers avoid rounding errors when loads are added and subtracted.
    """
    return _PREFILL_BASE + prompt_bytes if role is Role.PREFILL else 1


@dataclass(slots=True)
class LegHistory:
    """How the legs of a member have ended, for metrics and dashboard."""

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


@dataclass(slots=True)
class TokenProgress:
    """Whether an engine computes, by the token counts that the router has read from its page.

    Progress is a count that is larger than in the last reading of the same incarnation. The first
    reading shows no progress. A failed probe, or a page without counts, shows nothing at all.
    """

    since: float | None = None
    """When the first counts of this incarnation were read; None: the engine has shown none."""
    read_at: float = -inf
    """When counts were last read."""
    grew_at: float = -inf
    """When a reading last showed progress."""
    _counts: tuple[float | None, ...] = ()

    def note(self, counts: Sequence[float | None], now: float) -> None:
        """Record one reading. A count that went back is that of a new incarnation."""
        if all(count is None for count in counts):
            return
        growth = [
            later - earlier
            for earlier, later in zip(self._counts, counts, strict=False)
            if earlier is not None and later is not None
        ]
        if self.since is None or min(growth, default=0) < 0:
            self.since, self._counts = now, tuple(counts)
        else:
            if max(growth, default=0) > 0:
                self.grew_at = now
            self._counts = tuple(
                earlier if later is None else later
                for earlier, later in zip(self._counts, counts, strict=True)
            )
        self.read_at = now

    def has_stalled(self, began: float, now: float, stall_s: float) -> bool:
        """True if readings since `began` show no progress, over `stall_s` or more."""
        if self.since is None:
            return False
        seen_from = max(began, self.since)
        return self.grew_at < seen_from < self.read_at and now - seen_from >= stall_s


@dataclass(slots=True, eq=False)
class Member:
    """An instance with its breaker, lease and load."""

    instance: Instance
    breaker: Breaker
    lease_until: float = inf
    """When the registration of a member runs out; infinity for permanent members."""
    is_draining: bool = False
    has_left: bool = False
    """The member drains at its own request, not an operator's, until it registers again."""
    ready_at: float = -inf
    """When the member may be given a leg. Cached, because every choice reads the time for every
    member: call `update_ready_at` after any change.
    """
    load: int = 0
    """Sum of the weights of the running legs."""
    num_running: int = 0
    last_chosen: int = 0
    """Value of the fleet's choice counter when this member was last chosen or given a leg."""
    incarnation: int = 0
    """Grows with each restart, which empties the instance's cache."""
    probe_at: float = -inf
    failing_since: float | None = None
    """When this D first could not use KV; None if the D has answered a leg since."""
    progress: TokenProgress = field(default_factory=TokenProgress)
    """What the instance's own figures show about its engine."""
    record: LegHistory = field(default_factory=LegHistory)

    @property
    def is_static(self) -> bool:
        return self.lease_until == inf

    @property
    def is_drained_by_operator(self) -> bool:
        return self.is_draining and not self.has_left

    @property
    def expires_at(self) -> float:
        """When the member is removed. On a busy machine renewals come late, so a member that
        answers the router's probes is given time. A member that an operator has drained stays:
        it would otherwise return undrained with its next renewal.
        """
        if self.is_drained_by_operator:
            return inf
        is_alive = (
            not self.is_draining
            and self.breaker.options.probe_interval_s > 0
            and self.breaker.is_reachable
        )
        return self.lease_until + (_GRACE_S if is_alive else 0.0)

    def state(self, now: float) -> MemberState:
        if self.is_draining:
            return MemberState.DRAINING
        phase = self.breaker.phase_at(now)
        if phase is not BreakerPhase.CLOSED:
            return MemberState.EJECTED if phase is BreakerPhase.EJECTED else MemberState.HALF_OPEN
        if now < self.breaker.cooldown_until:
            return MemberState.COOLDOWN
        if self.breaker.is_suspect:
            return MemberState.SUSPECT
        return MemberState.HEALTHY if self.breaker.is_reached else MemberState.NEW

    def is_usable(self, now: float) -> bool:
        """True if a request sent now can be served, as far as the router knows."""
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
    """A leg that runs on a member, which may be removed meanwhile. Ended exactly once."""

    member: Member
    weight: int
    is_trial: bool
    generation: int
    """Generation of the member's breaker when the leg began."""
    incarnation: int
    """Incarnation of the member when the leg began."""
    began: float
    is_answered: bool = False
    is_over: bool = False

    @property
    def instance(self) -> Instance:
        return self.member.instance
