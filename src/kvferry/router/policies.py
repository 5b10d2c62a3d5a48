"""Who gets the next request: the policies, chosen per role by name.

A policy is asked with members that may all be used, and told who was. It keeps no members: those it is not asked about are not chosen.
Pure: chance is passed in. One thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from kvferry.errors import ConfigError
from kvferry.router.instances import Role
from kvferry.router.members import Member, RoutingHints, leg_weight
from kvferry.router.prefix_index import PrefixIndex, hash_prefixes

__all__ = [
    "POLICIES",
    "ConversationAffinity",
    "LeastLoad",
    "Policy",
    "PowerOfTwo",
    "PrefixAffinity",
    "RoundRobin",
    "make_policy",
]

_by_last_chosen = attrgetter("last_chosen")


class Policy(Protocol):
    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        """One of the candidates, of which there is at least one, and why it. Changes nothing: who asks twice gets a like answer."""
        ...

    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        """A leg was given to it."""
        ...


class _Stateless:
    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        pass


class RoundRobin(_Stateless):
    """Who was not given one for the longest time. Unlike an index that goes round, that stays fair when members come, go and rest."""

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        return min(candidates, key=_by_last_chosen), "turn"


class LeastLoad(_Stateless):
    """Equals take turns, else the first of an idle fleet would get everything."""

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        return _least(candidates), "least_load"


@dataclass(slots=True)
class PowerOfTwo(_Stateless):
    """The less loaded of two at random. Several routers that see only their own load do not all run to the same one."""

    draw: Callable[[], float]

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        count = len(candidates)
        if count == 1:
            return candidates[0], "only"
        first, second = divmod(int(self.draw() * count * (count - 1)), count - 1)
        one, other = candidates[first], candidates[second + (second >= first)]
        return _least((one, other)), "two_choices"


@dataclass(slots=True)
class PrefixAffinity:
    """Who was given the longest beginning of this prompt, unless it has much more to do than the least loaded: a popular beginning
    must not make one instance work for all."""

    max_ratio: float = 1.5
    slack_legs: int = 2
    """So many legs like this one it may have more in any case."""
    index: PrefixIndex = field(default_factory=PrefixIndex)

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        least = _least(candidates)
        prefix_hashes = _prefix_hashes_of(hints)
        if not prefix_hashes:
            return least, "no_prefix"
        limit = self.max_ratio * least.load + self.slack_legs * leg_weight(least.instance.role, len(hints.prompt))
        reason, among = "no_prefix", set(candidates)
        for holders in self.index.holders(prefix_hashes):
            usable = [member for member in holders if member in among]
            if not usable:
                continue
            holder = _least(usable)
            if holder.load <= limit:
                return holder, "prefix"
            reason = "prefix_overloaded"
        return least, reason

    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        self.index.add(_prefix_hashes_of(hints), member)


@dataclass(slots=True)
class ConversationAffinity:
    """Who served the last turn, else whom the other policy chooses."""

    fallback: Policy

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        if hints.conversation is not None:
            last = _find(candidates, hints)
            if last is not None:
                return last, "conversation"
        return self.fallback.choose(candidates, hints)

    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        self.fallback.note_begun(member, hints)


def _least(candidates: Sequence[Member]) -> Member:
    """By load, then by turn. Half the time of `min` with a key."""
    least = candidates[0]
    for member in candidates:
        if member.load < least.load or (member.load == least.load and member.last_chosen < least.last_chosen):
            least = member
    return least


def _find(candidates: Sequence[Member], hints: RoutingHints) -> Member | None:
    for member in candidates:
        if member.instance is hints.conversation:
            return member
    return next((member for member in candidates if member.instance == hints.conversation), None)


def _prefix_hashes_of(hints: RoutingHints) -> list[int]:
    if hints.prefix_hashes is None:
        hints.prefix_hashes = hash_prefixes(hints.prompt)
    return hints.prefix_hashes


def _conversation_affinity(role: Role, draw: Callable[[], float]) -> Policy:
    """A decoder takes what it lacks from P, so that only its load counts; P has to compute what it lacks."""
    return ConversationAffinity(PrefixAffinity() if role is Role.PREFILL else LeastLoad())


POLICIES: Mapping[str, Callable[[Role, Callable[[], float]], Policy]] = {
    "round_robin": lambda role, draw: RoundRobin(),
    "least_load": lambda role, draw: LeastLoad(),
    "power_of_two": lambda role, draw: PowerOfTwo(draw),
    "prefix_affinity": lambda role, draw: PrefixAffinity(),
    "conversation_affinity": _conversation_affinity,
}


def make_policy(name: str, role: Role, draw: Callable[[], float]) -> Policy:
    """`draw`: numbers from 0 to below 1."""
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is no routing policy; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](role, draw)
