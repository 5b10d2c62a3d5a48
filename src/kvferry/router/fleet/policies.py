"""Which instances have lately been given a prompt that begins like this one.

A prompt is known by marks of its beginnings: a chain of hashes over its raw JSON text, since the
next turn of a conversation writes the last one's text again, but for the closing bracket, and goes
on. Marks lie closer at the start (512 bytes) than far out (a sixth of the distance), and far out
only the text before each mark is looked at, so that a long prompt has few marks and costs little.
Two prompts with one mark are routed alike, no more: engines compare tokens themselves, so a
collision costs a cache miss at most. Python's own hash is keyed per process, which denies
collisions to whoever might want them, and is the fastest at hand.

Pure. One thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import Role
from kvferry.router.fleet.members import Member, RoutingHints, leg_weight

__all__ = [
    "POLICIES",
    "ConversationAffinity",
    "LeastLoad",
    "Policy",
    "PowerOfTwo",
    "PrefixAffinity",
    "PrefixIndex",
    "RoundRobin",
    "hash_prefixes",
    "make_policy",
]


_STEP_BYTES = 512
_DENSE_BYTES = 4 * 1024
_SAMPLE_BYTES = 256
_LOOKED_AT_BYTES = 2 * 1024 * 1024
_HOLDERS = 4

_Holder = tuple[Member, int]


def _hashed_ranges() -> Iterator[tuple[int, int]]:
    """Where the text of each mark begins and ends."""
    start = 0
    while start < _LOOKED_AT_BYTES:
        end = start + max(_STEP_BYTES, start // 6)
        yield (start if end <= _DENSE_BYTES else end - _SAMPLE_BYTES), end
        start = end


_SPANS = tuple(_hashed_ranges())


def hash_prefixes(prompt: bytes | memoryview) -> list[int]:
    """One per span that is full, shortest beginning first."""
    size, prefix_hash, prefix_hashes = len(prompt), 0, []
    for start, end in _SPANS:
        if end > size:
            break
        prefix_hash = hash((prefix_hash, bytes(prompt[start:end])))
        prefix_hashes.append(prefix_hash)
    return prefix_hashes


@dataclass(slots=True)
class PrefixIndex:
    """The marks used last, each with the few members that were given it last.

    Two generations: when the young one is full it becomes the old one, and what was in the old one
    and not used since is forgotten. That is a coarser order than least recently used, at a fraction
    of the time.
    """

    max_hashes: int = 65536
    _young: dict[int, tuple[_Holder, ...]] = field(default_factory=dict, init=False)
    _old: dict[int, tuple[_Holder, ...]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def holders(self, prefix_hashes: list[int]) -> Iterator[list[Member]]:
        """Longest beginning first. A member that has restarted since holds nothing."""
        young, old = self._young, self._old
        for prefix_hash in reversed(prefix_hashes):
            held = young.get(prefix_hash) or old.get(prefix_hash)
            if held is not None:
                yield [member for member, incarnation in held if member.incarnation == incarnation]

    def add(self, prefix_hashes: list[int], member: Member) -> None:
        if len(self._young) + len(prefix_hashes) > self.max_hashes // 2:
            self._young, self._old = {}, self._young
        holder = (member, member.incarnation)
        young, old = self._young, self._old
        for prefix_hash in prefix_hashes[: self.max_hashes // 2]:
            held = young.get(prefix_hash)
            if held is None:
                held = old.get(prefix_hash, ())
            elif held[0] == holder:
                continue
            young[prefix_hash] = (
                (holder, *(other for other in held if other[0] is not member))[:_HOLDERS]
                if held
                else (holder,)
            )


# -------------------- policies --------------------
# Who gets the next request: the policies, chosen per role by name.
#
# A policy is asked with members that may all be used, and told who was. It keeps no members: those
# it is not asked about are not chosen. Pure: chance is passed in. One thread.


_by_last_chosen = attrgetter("last_chosen")


class Policy(Protocol):
    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        """One of the candidates, of which there is at least one, and why it. Changes nothing: who
        asks twice gets a like answer.
        """
        ...

    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        """A leg was given to it."""
        ...


class _Stateless:
    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        pass


class RoundRobin(_Stateless):
    """Who was not given one for the longest time. Unlike an index that goes round, that stays fair
    when members come, go and rest.
    """

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        return min(candidates, key=_by_last_chosen), "turn"


class LeastLoad(_Stateless):
    """Equals take turns, else the first of an idle fleet would get everything."""

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        return _least(candidates), "least_load"


@dataclass(slots=True)
class PowerOfTwo(_Stateless):
    """The less loaded of two at random. Several routers that see only their own load do not all run
    to the same one.
    """

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
    """Who was given the longest beginning of this prompt, unless it has much more to do than the
    least loaded: a popular beginning must not make one instance work for all.
    """

    max_ratio: float = 1.5
    slack_legs: int = 2
    """So many legs like this one it may have more in any case."""
    index: PrefixIndex = field(default_factory=PrefixIndex)

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        least = _least(candidates)
        prefix_hashes = _prefix_hashes_of(hints)
        if not prefix_hashes:
            return least, "no_prefix"
        limit = self.max_ratio * least.load + self.slack_legs * leg_weight(
            least.instance.role, len(hints.prompt)
        )
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
        if member.load < least.load or (
            member.load == least.load and member.last_chosen < least.last_chosen
        ):
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
    """A decoder takes what it lacks from P, so that only its load counts; P has to compute what it
    lacks.
    """
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
