"""The fleet: membership, the choice of an instance for the next leg, and health.

Candidates come in tiers; the policy of the role chooses from the first non-empty tier:

1. usable: not draining, not in cooldown, and either not ejected or half open without a trial leg;
2. in cooldown, because the instance answered 503 a moment ago;
3. last resort (Envoy's panic rule): all members, ejected or not. Only in roles that must answer,
   because a bad candidate is still better than a certain failure.

In a role that must answer, the last member that is not ejected is never ejected. While that member
fails too (`suspect`), the ejected members are equally good candidates. In an optional role (P, if D
can compute prompts itself) all members may be ejected. Draining members are never chosen.

Pure: the caller passes `now` (local monotonic seconds) and the random source. Used on one thread.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf

from kvferry.errors import ConfigError, LocalProtocolError
from kvferry.router.fleet.health import Breaker, BreakerPhase, HealthOptions
from kvferry.router.fleet.instances import Instance, Outcome, Role, reaches
from kvferry.router.fleet.members import (
    Leg,
    Member,
    RoutingHints,
    TokenProgress,
    leg_weight,
)
from kvferry.router.fleet.policies import Policy, make_policy
from kvferry.types import Address


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Routing policies and health settings of a fleet."""

    policies: Mapping[Role, str] = field(
        default_factory=lambda: {
            Role.PREFILL: "prefix_affinity",
            Role.DECODE: "conversation_affinity",
        }
    )
    optional_roles: frozenset[Role] = frozenset()
    """Roles that the router can do without."""
    max_ejected_share: float = 1.0
    """Largest share of a role that may be ejected, in roles that must answer. With less than 1,
    large fleets accept some bad answers rather than overload the few remaining instances.
    """
    health: HealthOptions = field(default_factory=HealthOptions)


@dataclass(slots=True)
class _RoleMembers:
    """The members of one role."""

    policy: Policy
    members: list[Member] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """How often a member was chosen for which reason."""


class Fleet:
    """Members by role; the caller reports begin, answer and end of every leg."""

    def __init__(self, options: FleetOptions, draw: Callable[[], float]) -> None:
        """`draw` returns random numbers from 0 to below 1. ConfigError if a policy is unknown."""
        self._options = options
        self._draw = draw
        self._by_role = {
            role: _RoleMembers(make_policy(options.policies[role], role, draw)) for role in Role
        }
        self._members: dict[Instance, Member] = {}
        self._num_chosen = 0
        self.listening: Address | None = None
        """Where the router itself listens, once it does."""
        self.kv_used_at: dict[Instance, float] = {}
        """When a D last used the KV of each P, as far as known (`is_kv_proof_wanted`)."""

    # -- membership --

    def is_own(self, instance: Instance) -> bool:
        """Whether the instance would be this router. Names are not looked up: the probes find those
        that lead back.
        """
        return self.listening is not None and reaches(instance.address, self.listening)

    def check_foreign(self, instance: Instance) -> None:
        """Raise ConfigError if the instance would be this router."""
        if self.is_own(instance):
            raise ConfigError(
                f"{instance} would be this router, which listens on {self.listening}; give the "
                "address of an engine"
            )

    def add(self, instance: Instance, now: float) -> Member:
        """Add a permanent member. Adding a draining member again ends the draining."""
        member = self._admit(instance, now)
        member.lease_until = inf
        member.is_draining = member.has_left = False
        member.update_ready_at()
        return member

    def renew(self, instance: Instance, ttl_s: float, now: float) -> Member:
        """Add a self-registered member, or renew its membership for `ttl_s` seconds.

        An operator's decision takes precedence: a permanent member stays permanent, and a member
        drained by an operator keeps draining.
        """
        is_known = instance in self._members
        member = self._admit(instance, now)
        if not is_known or not member.is_static:
            member.lease_until = now + ttl_s
        if member.has_left:
            member.is_draining = member.has_left = False
            member.update_ready_at()
        return member

    def drain(self, instance: Instance) -> bool:
        """Give the instance no new legs; running legs continue. False if not a member."""
        member = self._members.get(instance)
        if member is not None:
            member.is_draining, member.has_left = True, False
            member.update_ready_at()
        return member is not None

    def leave(self, instance: Instance) -> bool:
        """Drain at the instance's own request. Its next incarnation may register again, unless an
        operator drained the instance.
        """
        member = self._members.get(instance)
        if member is not None and not member.is_draining:
            self.drain(instance)
            member.has_left = True
        return member is not None

    def is_drained(self, instance: Instance) -> bool:
        """True if a draining member has no running legs, or the instance is not a member."""
        member = self._members.get(instance)
        return member is None or (member.is_draining and member.num_running == 0)

    def remove(self, instance: Instance) -> bool:
        """Remove a member; its running legs continue. False if the instance is not a member."""
        member = self._members.pop(instance, None)
        if member is not None:
            self._by_role[instance.role].members.remove(member)
            self.kv_used_at.pop(instance, None)
        return member is not None

    def expire(self, now: float) -> list[Instance]:
        """Remove and return the self-registered members that have not renewed in time and do not
        answer probes.
        """
        gone = [member.instance for member in self._members.values() if member.expires_at <= now]
        for instance in gone:
            self.remove(instance)
        return gone

    def restarted(self, instance: Instance, now: float) -> None:
        """Record that a new process answers at the address: no failures, an empty cache.

        An operator's drain of a permanent member continues. That of a self-registered member was
        for the process that has ended: the new one joins by registering.
        """
        member = self._members.get(instance)
        if member is not None:
            member.breaker.restart()
            member.update_ready_at()
            member.incarnation += 1
            if not member.is_static:
                member.has_left = member.is_draining
            member.progress = TokenProgress()
            self.kv_used_at.pop(instance, None)
            member.probe_at = min(member.probe_at, now)

    def members(self, role: Role | None = None) -> list[Member]:
        return list(self._members.values() if role is None else self._by_role[role].members)

    def get(self, instance: Instance) -> Member | None:
        return self._members.get(instance)

    def count(self, role: Role, outcome: Outcome) -> int:
        """Number of members whose last leg had this outcome."""
        return sum(member.record.last_outcome is outcome for member in self._by_role[role].members)

    # -- choice --

    def choose(
        self, role: Role, hints: RoutingHints, now: float, tried: Collection[Instance] = ()
    ) -> Instance | None:
        """Choose an instance not in `tried` for a leg; None if there is none.

        The choice is recorded, so that concurrent requests are spread although none has begun.
        """
        chosen = self._find(role, hints, now, tried)
        if chosen is None:
            return None
        member, reason = chosen
        self._note_chosen(member)
        self._by_role[role].reasons[reason] += 1
        return member.instance

    def peek(
        self, role: Role, hints: RoutingHints, now: float, tried: Collection[Instance] = ()
    ) -> Instance | None:
        """The instance that `choose` would return; nothing is recorded."""
        chosen = self._find(role, hints, now, tried)
        return None if chosen is None else chosen[0].instance

    def _find(
        self, role: Role, hints: RoutingHints, now: float, tried: Collection[Instance]
    ) -> tuple[Member, str] | None:
        role_members = self._by_role[role]
        left = (
            [member for member in role_members.members if member.instance not in tried]
            if tried
            else role_members.members
        )
        candidates = [member for member in left if member.ready_at <= now]
        tier = ""
        if len(candidates) < len(left):
            candidates, tier = self._fall_back(role, left, candidates, now)
        if not candidates:
            return None
        member, reason = role_members.policy.choose(candidates, hints)
        return member, tier or reason

    def _note_chosen(self, member: Member) -> None:
        self._num_chosen += 1
        member.last_chosen = self._num_chosen

    def reasons(self, role: Role) -> Mapping[str, int]:
        """How often members were chosen for which reason."""
        return self._by_role[role].reasons

    def _fall_back(
        self, role: Role, left: list[Member], usable: list[Member], now: float
    ) -> tuple[list[Member], str]:
        """Candidates and tier name when some members are not ready; "" is the first tier."""
        has_to_answer = role not in self._options.optional_roles
        if usable and not (has_to_answer and all(member.breaker.is_suspect for member in usable)):
            return usable, ""
        active = [member for member in left if not member.is_draining]
        in_cooldown = [
            member
            for member in active
            if member.breaker.not_before <= now and not member.breaker.is_suspect
        ]
        if in_cooldown or not has_to_answer:
            return in_cooldown, "cooldown"
        return active, "last_resort"

    def begin(
        self,
        instance: Instance,
        now: float,
        hints: RoutingHints | None = None,
        weight: int | None = None,
    ) -> Leg:
        """Record that a leg is sent to the instance. The caller must call `end` in every case."""
        member = self._members.get(instance)
        if member is None:
            raise LocalProtocolError(f"a leg was given to {instance}, which is not in the fleet")
        if weight is None:
            weight = leg_weight(instance.role, 0 if hints is None else len(hints.prompt))
        self._note_chosen(member)
        member.load += weight
        member.num_running += 1
        if hints is not None:
            self._by_role[instance.role].policy.note_begun(member, hints)
        is_trial = member.breaker.begin(now)
        if is_trial:
            member.update_ready_at()
        return Leg(member, weight, is_trial, member.breaker.generation, member.incarnation, now)

    def note_answer(self, leg: Leg, now: float) -> None:
        """Record that an answer has begun; the instance is healthy before the stream has ended.
        Further calls for the same leg change nothing.
        """
        if not leg.is_answered:
            leg.is_answered = True
            leg.member.failing_since = None
            leg.member.breaker.note_answer(leg.generation, now)
            leg.member.update_ready_at()

    def end(self, leg: Leg, outcome: Outcome, now: float, error: str = "") -> None:
        """Record the outcome of a leg; exactly once per leg."""
        if leg.is_over:
            raise LocalProtocolError(f"a leg at {leg.instance} was ended twice")
        leg.is_over = True
        member, breaker = leg.member, leg.member.breaker
        member.load -= leg.weight
        member.num_running -= 1
        member.record.note_outcome(outcome)
        if outcome is Outcome.ANSWERED:
            self.note_answer(leg, now)
        elif outcome is Outcome.FAILED:
            member.record.note_error(error, now)
            if breaker.note_failure(leg.generation, now):
                self._eject(member, now)
        elif outcome is Outcome.REFUSED:
            breaker.note_refusal(now)
        if leg.is_trial:
            breaker.end_trial(leg.generation, now)
        member.update_ready_at()

    def note_transfer_failed(self, leg: Leg, prefiller: Instance, now: float) -> bool:
        """Record that D could not use the KV of P; True if D is at fault.

        A P with other weights is refused by every D, and no D is at fault. A D is at fault if other
        Ds have used the KV of this P since this D first failed, and it has answered nothing since.
        """
        used_at = self.kv_used_at.get(prefiller, -inf)
        if leg.member.failing_since is None:
            leg.member.failing_since = now
        return used_at > leg.member.failing_since

    @property
    def is_kv_proof_wanted(self) -> bool:
        """Whether a D could not use the KV of a P and has answered nothing since. Only then does it
        matter whether other Ds use the KV of this P.
        """
        return any(member.failing_since is not None for member in self.members(Role.DECODE))

    def note_kv_used(self, prefiller: Instance, now: float) -> None:
        """Record that a D has used the KV of P."""
        if prefiller in self._members:
            self.kv_used_at[prefiller] = now

    def note_tokens(self, instance: Instance, counts: Sequence[float | None], now: float) -> None:
        """Record how many tokens the instance has computed by its own figures; None: not shown."""
        member = self._members.get(instance)
        if member is not None:
            member.progress.note(counts, now)

    def has_stalled(self, leg: Leg, now: float, ready_at: float = -inf) -> bool:
        """True if the engine has computed nothing in all the time of a long leg: it hangs, although
        its API server still answers probes. `ready_at`: before this time the engine had to wait for
        the KV of its peer.
        """
        began = max(leg.began, ready_at)
        return leg.member.progress.has_stalled(began, now, self._options.health.stall_s)

    def is_current(self, leg: Leg) -> bool:
        """True if the instance is still a member and has the same incarnation as when the leg
        began: only then are retained blocks valid.
        """
        return (
            self._members.get(leg.instance) is leg.member
            and leg.incarnation == leg.member.incarnation
        )

    def _eject(self, member: Member, now: float, is_absent: bool = False) -> None:
        """Eject a member if its role permits. A half-open member was ejected before, so the role
        can spare the member.
        """
        if member.breaker.phase is BreakerPhase.HALF_OPEN or self._can_eject(member.instance.role):
            member.breaker.eject(now, is_absent)
            member.probe_at = now

    def _can_eject(self, role: Role) -> bool:
        active = [member for member in self._by_role[role].members if not member.is_draining]
        if role in self._options.optional_roles:
            return True
        num_ejected = sum(member.breaker.phase is not BreakerPhase.CLOSED for member in active)
        return num_ejected < min(
            len(active) - 1, floor(self._options.max_ejected_share * len(active))
        )

    # -- probes --

    def take_probes(self, now: float) -> list[Instance]:
        """Return the instances whose probe is due, and schedule the next probe of each."""
        if not self._options.health.probe_interval_s:
            return []
        due = [member for member in self._members.values() if member.probe_at <= now]
        for member in due:
            member.probe_at = now + self._probe_interval(member)
        return [member.instance for member in due]

    def note_probe_passed(self, instance: Instance, now: float) -> None:
        member = self._members.get(instance)
        if member is not None:
            member.breaker.note_probe_passed(now)
            member.probe_at = now + self._probe_interval(member)
            member.update_ready_at()

    def note_probe_failed(self, instance: Instance, now: float, error: str = "") -> None:
        member = self._members.get(instance)
        if member is not None:
            member.record.note_error(error, now)
            if member.breaker.note_probe_failed():
                self._eject(member, now, is_absent=True)
            member.probe_at = now + self._probe_interval(member)
            member.update_ready_at()

    def next_deadline(self) -> float | None:
        """When to call `take_probes` and `expire` next; None if there is nothing to wait for."""
        deadlines = [member.expires_at for member in self._members.values()]
        if self._options.health.probe_interval_s:
            deadlines += [member.probe_at for member in self._members.values()]
        soonest = min(deadlines, default=inf)
        return None if soonest == inf else soonest

    # -- helpers --

    def _admit(self, instance: Instance, now: float) -> Member:
        member = self._members.get(instance)
        if member is None:
            member = Member(instance, Breaker(self._options.health, self._draw), probe_at=now)
            self._members[instance] = member
            self._by_role[instance.role].members.append(member)
        member.instance = instance
        return member

    def _probe_interval(self, member: Member) -> float:
        """Seconds until the next probe, jittered so that members added together are not probed
        together forever.
        """
        health = self._options.health
        interval = (
            min(health.probe_ejected_s, health.probe_interval_s)
            if member.breaker.wants_probes
            else health.probe_interval_s
        )
        return interval * (1 - health.jitter * self._draw() / 2)
