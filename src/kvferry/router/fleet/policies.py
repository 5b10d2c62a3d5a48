"""Routing policies: which instance gets the next leg. Chosen per role, by name.

The fleet (`fleet.py`) decides which instances are candidates. A policy gets candidates that may
all be used and is notified of each leg that begins. A policy stores no members except in
`PrefixIndex`, and returns only given members. Pure: the random source is passed in. Used on one
thread.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import Role
from kvferry.router.fleet.members import Member, RoutingHints, leg_weight

# -- prefix hashes --
# Which instances were lately given a prompt with the same beginning.
#
# The prefixes of a prompt are identified by a chain of hashes over the raw JSON text: the next turn
# of a conversation repeats the text of the last turn, except for the closing bracket, and appends
# to the text. At the start a hash is taken every 512 bytes; further out the step is a sixth of the
# distance from the start, and only the 256 bytes before each position are hashed, so a long prompt
# has few hashes and costs little. Two prompts with the same hash are only routed alike: engines
# compare the tokens, so a collision costs at most a cache miss. Python's own hash is keyed per
# process, so clients cannot construct collisions, and is the fastest hash available.

_STEP_BYTES = 512
_DENSE_BYTES = 4 * 1024
_SAMPLE_BYTES = 256
_LOOKED_AT_BYTES = 2 * 1024 * 1024
_HOLDERS = 4

_Holder = tuple[Member, int]


def _hashed_ranges() -> Iterator[tuple[int, int]]:
    """Start and end of the text that each hash covers."""
    start = 0
    while start < _LOOKED_AT_BYTES:
        end = start + max(_STEP_BYTES, start // 6)
        yield (start if end <= _DENSE_BYTES else end - _SAMPLE_BYTES), end
        start = end


_SPANS = tuple(_hashed_ranges())


def hash_prefixes(prompt: bytes | memoryview) -> list[int]:
    """One hash per complete range, shortest prefix first."""
    size, prefix_hash, prefix_hashes = len(prompt), 0, []
    for start, end in _SPANS:
        if end > size:
            break
        prefix_hash = hash((prefix_hash, bytes(prompt[start:end])))
        prefix_hashes.append(prefix_hash)
    return prefix_hashes


@dataclass(slots=True)
class PrefixIndex:
    """The most recently used prefix hashes, each with the members last given that prefix.

    Two generations: when the young generation is full, it replaces the old generation, and unused
    entries of the old generation are dropped. The order is coarser than least recently used, and
    takes a fraction of the time.
    """

    max_hashes: int = 65536
    _young: dict[int, tuple[_Holder, ...]] = field(default_factory=dict, init=False)
    _old: dict[int, tuple[_Holder, ...]] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def holders(self, prefix_hashes: list[int]) -> Iterator[list[Member]]:
        """Members that hold each prefix, longest prefix first; restarted members hold nothing."""
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


# -- policies --


_by_last_chosen = attrgetter("last_chosen")


class Policy(Protocol):
    """Chooses a member for a leg. Implementations are pure."""

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        """Choose one of the candidates (at least one), and name the reason. Changes no state, so
        asking twice gives an equivalent answer.
        """
        ...

    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        """Record that a leg was given to the member."""
        ...


class _Stateless:
    def note_begun(self, member: Member, hints: RoutingHints) -> None:
        pass


class RoundRobin(_Stateless):
    """The member that was not chosen for the longest time. Unlike a rotating index, this stays fair
    when members join, leave or rest.
    """

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        return min(candidates, key=_by_last_chosen), "round_robin"


class LeastLoad(_Stateless):
    """The member with the least load; equal members take turns, else one would get everything."""

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        return _least(candidates), "least_load"


@dataclass(slots=True)
class PowerOfTwo(_Stateless):
    """The less loaded of two random members. Several routers, each seeing only its own load, do not
    all choose the same instance.
    """

    draw: Callable[[], float]

    def choose(self, candidates: Sequence[Member], hints: RoutingHints) -> tuple[Member, str]:
        count = len(candidates)
        if count == 1:
            return candidates[0], "only"
        # One random number gives an ordered pair of two different members.
        first, second = divmod(int(self.draw() * count * (count - 1)), count - 1)
        one, other = candidates[first], candidates[second + (second >= first)]
        return _least((one, other)), "two_choices"


@dataclass(slots=True)
class PrefixAffinity:
    """The member given the longest prefix of this prompt, unless it is overloaded: a popular prefix
    must not send all requests to one instance.
    """

    max_ratio: float = 1.5
    """A holder may have this many times the load of the least loaded member."""
    slack_legs: int = 2
    """In addition, a holder may have this many legs of this weight."""
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
    """The member that served the conversation's last turn, else the choice of `fallback`."""

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
    """The least loaded member; equal members take turns. Half the time of `min` with a key."""
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
    """For D only the load matters, because D fetches missing KV from P. P must compute missing KV,
    so P also uses prefix affinity.
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
    """Make a policy by name. `draw` returns random numbers from 0 to below 1."""
    if name not in POLICIES:
        raise ConfigError(f"{name!r} is not a routing policy; choose one of {', '.join(POLICIES)}")
    return POLICIES[name](role, draw)
