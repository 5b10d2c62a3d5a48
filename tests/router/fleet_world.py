"""Simulates a fleet in virtual time: engines whose service time grows with the uncached text and
that may die, come back or be slow, and clients that send requests.

The simulation measures counts: how many legs each instance got, how much text was cached, and how
many legs went to dead instances. It is deterministic for a given seed.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from kvferry.router.fleet.fleet import Fleet, FleetOptions
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.instances import Instance, Outcome, Role
from kvferry.router.fleet.members import Leg, MemberState, RoutingHints
from kvferry.types import Address

_REFUSED_AFTER_S = 0.001
_PROBE_TAKES_S = 0.002


def make_instance(number: int, role: Role = Role.PREFILL) -> Instance:
    return Instance(role, Address(f"host{number}", 8000))


def make_fleet(
    policy: str,
    size: int,
    role: Role = Role.PREFILL,
    health: HealthOptions | None = None,
    seed: int = 0,
) -> Fleet:
    """A fleet whose instances have all passed a probe."""
    fleet = Fleet(
        FleetOptions(policies=dict.fromkeys(Role, policy), health=health or HealthOptions()),
        random.Random(seed).random,
    )
    for number in range(size):
        fleet.add(make_instance(number, role), now=0.0)
        fleet.note_probe_passed(make_instance(number, role), now=0.0)
    return fleet


def conversation_texts(name: str, num_turns: int, turn_bytes: int, system: str = "") -> list[bytes]:
    """The JSON of the messages of each turn, as a client writes it: the previous turn's JSON
    without its closing bracket, plus two messages.
    """
    turns = []
    messages = f'[{{"role": "system", "content": "{system}"}}'
    for turn in range(num_turns):
        words = f"{name} says {turn} ".ljust(turn_bytes, name[-1])
        messages += f', {{"role": "user", "content": "{words}"}}'
        turns.append(f"{messages}]".encode())
        messages += f', {{"role": "assistant", "content": "answer {turn} to {name}"}}'
    return turns


@dataclass(slots=True)
class Engine:
    """Serves one request at a time, like a prefill engine with a full batch. Its cache holds the
    most recent texts.
    """

    bytes_per_s: float = 1e6
    base_s: float = 0.001
    max_cached: int = 64
    dead: list[tuple[float, float]] = field(default_factory=list)
    _busy_until: float = 0.0
    _cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def is_dead(self, now: float) -> bool:
        return any(start <= now < end for start, end in self.dead)

    def dies_within(self, start: float, end: float) -> float | None:
        return min((death for death, _ in self.dead if start < death <= end), default=None)

    def serve(self, text: bytes, now: float) -> tuple[float, int]:
        """Returns when the request is done, and how many of its bytes were cached."""
        cached = max((_common(text, other) for other in self._cached), default=0)
        self._cached[text] = None
        self._cached.move_to_end(text)
        while len(self._cached) > self.max_cached:
            self._cached.popitem(last=False)
        self._busy_until = (
            max(now, self._busy_until) + self.base_s + (len(text) - cached) / self.bytes_per_s
        )
        return self._busy_until, cached

    def lose_everything(self) -> None:
        self._busy_until = 0.0
        self._cached.clear()


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix, found by binary search because the texts are long."""
    low, high = 0, min(len(one), len(other)) if one[:64] == other[:64] else 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


@dataclass(slots=True)
class World:
    fleet: Fleet
    engines: dict[Instance, Engine]
    role: Role = Role.PREFILL
    sent: Counter[Instance] = field(default_factory=Counter)
    sent_to_dead: list[tuple[float, Instance]] = field(default_factory=list)
    answered_at: dict[Instance, list[float]] = field(default_factory=dict)
    num_answered: int = 0
    num_lost: int = 0
    cached_bytes: int = 0
    computed_bytes: int = 0
    waited_s: float = 0.0
    _events: list[tuple[float, int, object]] = field(default_factory=list)
    _serial: "count[int]" = field(default_factory=count)

    def run(self, arrivals: Sequence[tuple[float, bytes]]) -> None:
        """Send each text at its time. A failed request is retried on the other instances, once on
        each, as a router does.
        """
        for at, text in arrivals:
            self._at(at, _Request(text, at))
        for engine in self.engines.values():
            for _, back in engine.dead:
                self._at(back, engine)
        self._at(0.0, _Tick())
        while self.num_answered + self.num_lost < len(arrivals):
            now, _, event = heappop(self._events)
            match event:
                case _Request():
                    self._send(event, now)
                case _Ending():
                    self._end(event, now)
                case Engine():
                    event.lose_everything()
                case _Tick():
                    self._tick(event, now)
                case (Instance() as instance, bool() as is_well):
                    (self.fleet.note_probe_passed if is_well else self.fleet.note_probe_failed)(
                        instance, now
                    )

    def _at(self, at: float, event: object) -> None:
        heappush(self._events, (at, next(self._serial), event))

    def _tick(self, tick: "_Tick", now: float) -> None:
        for instance in self.fleet.take_probes(now):
            self._at(now + _PROBE_TAKES_S, (instance, not self.engines[instance].is_dead(now)))
        self._at(now + 0.05, tick)

    def _send(self, request: "_Request", now: float) -> None:
        hints = RoutingHints(request.text)
        instance = self.fleet.choose(self.role, hints, now, request.tried)
        if instance is None:
            self.num_lost += 1
            return
        request.tried.append(instance)
        leg = self.fleet.begin(instance, now, hints)
        self.sent[instance] += 1
        engine = self.engines[instance]
        if engine.is_dead(now):
            self.sent_to_dead.append((now, instance))
            self._at(now + _REFUSED_AFTER_S, _Ending(leg, request, Outcome.FAILED, 0))
            return
        done, cached = engine.serve(request.text, now)
        death = engine.dies_within(now, done)
        self._at(
            death or done,
            _Ending(leg, request, Outcome.FAILED if death else Outcome.ANSWERED, cached),
        )

    def _end(self, ending: "_Ending", now: float) -> None:
        self.fleet.end(ending.leg, ending.outcome, now)
        if ending.outcome is Outcome.FAILED:
            self._send(ending.request, now)
            return
        self.num_answered += 1
        self.answered_at.setdefault(ending.leg.instance, []).append(now)
        self.cached_bytes += ending.cached
        self.computed_bytes += len(ending.request.text) - ending.cached
        self.waited_s += now - ending.request.arrived_at


class _Tick:
    pass


@dataclass(slots=True)
class _Request:
    text: bytes
    arrived_at: float
    tried: list[Instance] = field(default_factory=list)


@dataclass(slots=True)
class _Ending:
    leg: Leg
    request: _Request
    outcome: Outcome
    cached: int


def fail(fleet: Fleet, instance: Instance, now: float, times: int = 1) -> None:
    for _ in range(times):
        fleet.end(fleet.begin(instance, now), Outcome.FAILED, now, "connection refused")


def answer(fleet: Fleet, instance: Instance, now: float) -> None:
    fleet.end(fleet.begin(instance, now), Outcome.ANSWERED, now)


def state_of(fleet: Fleet, instance: Instance, now: float) -> MemberState:
    member = fleet.get(instance)
    assert member is not None
    return member.state(now)


def chosen(fleet: Fleet, now: float, times: int = 6) -> set[Instance]:
    """The instances that get one of `times` consecutive legs. Each leg is ended by its client,
    which says nothing about the instance's health.
    """
    found = set()
    for _ in range(times):
        instance = fleet.choose(Role.PREFILL, RoutingHints(), now)
        assert instance is not None
        fleet.end(fleet.begin(instance, now), Outcome.ABANDONED, now)
        found.add(instance)
    return found


def refuse(fleet: Fleet, instance: Instance, now: float) -> None:
    fleet.end(fleet.begin(instance, now), Outcome.REFUSED, now)


def begin_trial(fleet: Fleet, instance: Instance, now: float) -> Leg:
    """Begin a leg on `instance`, as if all other instances had been tried."""
    others = [
        member.instance for member in fleet.members(instance.role) if member.instance != instance
    ]
    assert fleet.choose(instance.role, RoutingHints(), now, others) == instance
    return fleet.begin(instance, now)
