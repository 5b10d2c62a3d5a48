"""Which instances there are, which one a request goes to (round robin per role), and how each did last time.

One that refuses (503: it is draining, or full) is passed over for a moment while there are others.
Pure: the caller passes `now` (local monotonic seconds). An `InstancePool` is used by one thread.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from kvferry.errors import ConfigError
from kvferry.types import Address

__all__ = ["Instance", "InstancePool", "Outcome", "Role", "pair_instances", "parse_instance"]

REST_S = 1.0
"""What an engine that drains says in `Retry-After`. Short, because one that was only full is missed meanwhile."""


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class Outcome(StrEnum):
    """Of the last leg that an instance was given."""

    ANSWERED = "answered"
    REFUSED = "refused"
    FAILED = "failed"
    ABANDONED = "abandoned"
    """By its client, or for the sake of the other leg: it says nothing about the instance."""


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine's HTTP address in the role the router uses it for."""

    role: Role
    address: Address
    tls: bool = field(default=False, compare=False)
    """How it is spoken to, not who it is: an address is drained and removed without a word about it."""

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    def __str__(self) -> str:
        return f"{self.role} instance {self.url}"


def pair_instances(role: Role, hosts: Sequence[str], ports: Sequence[int]) -> tuple[Instance, ...]:
    """Host i with port i. One host may stand for several ports."""
    if len(hosts) == 1:
        hosts = [hosts[0]] * len(ports)
    if len(hosts) != len(ports) or not ports:
        raise ConfigError(f"{len(hosts)} {role} hosts and {len(ports)} {role} ports were given; give one port per host")
    for host, port in zip(hosts, ports, strict=True):
        if not host or not 0 < port < 65536:
            raise ConfigError(f"{host!r} port {port} is no address of a {role} instance; give a host name and a port from 1 to 65535")
    return tuple(Instance(role, Address(host, port)) for host, port in zip(hosts, ports, strict=True))


def parse_instance(role: Role, url: str) -> Instance:
    """From `http://HOST:PORT`, or `HOST:PORT`. ConfigError for anything else."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host, port, parts = None, 0, urlsplit("")
    if not host or parts.scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or parts.username:
        raise ConfigError(f"{url!r:.200} is no address of a {role} instance; give http://HOST:PORT")
    return Instance(role, Address(host, port), parts.scheme == "https")


@dataclass(slots=True)
class InstancePool:
    """Takes turns among the instances of each role."""

    prefillers: tuple[Instance, ...]
    decoders: tuple[Instance, ...]
    _turns: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0), init=False)

    _outcomes: dict[Instance, Outcome] = field(default_factory=dict, init=False)
    _rests_until: dict[Instance, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for role in Role:
            if not self.of(role):
                raise ConfigError(f"no {role} instance was given; name at least one")

    def of(self, role: Role) -> tuple[Instance, ...]:
        return self.prefillers if role is Role.PREFILL else self.decoders

    def choose(self, role: Role, now: float, tried: Collection[Instance] = ()) -> Instance | None:
        """Whose turn it is among those not tried yet, the resting ones last; None when all were tried."""
        chosen = self._next(role, now, tried)
        if chosen is None:
            return None
        self._turns[role] = (chosen + 1) % len(self.of(role))
        return self.of(role)[chosen]

    def peek(self, role: Role, now: float) -> Instance:
        """Who would be chosen, though the turn is not taken."""
        chosen = self._next(role, now)
        assert chosen is not None
        return self.of(role)[chosen]

    def _next(self, role: Role, now: float, tried: Collection[Instance] = ()) -> int | None:
        instances, first = self.of(role), self._turns[role]
        turns = [turn % len(instances) for turn in range(first, first + len(instances))]
        left = [turn for turn in turns if instances[turn] not in tried]
        return next((turn for turn in left if not self._is_resting(instances[turn], now)), left[0] if left else None)

    def note(self, instance: Instance, outcome: Outcome) -> None:
        """How a leg went."""
        self._outcomes[instance] = outcome

    def note_refusal(self, instance: Instance, now: float) -> None:
        """It answered 503. A later answer does not end its rest: an instance that drains still answers what it had taken before."""
        self.note(instance, Outcome.REFUSED)
        self._rests_until[instance] = now + REST_S

    def count(self, role: Role, outcome: Outcome) -> int:
        """How many instances had this outcome last; those that have not been asked yet had none."""
        return sum(self._outcomes.get(instance) is outcome for instance in self.of(role))

    def _is_resting(self, instance: Instance, now: float) -> bool:
        return now < self._rests_until.get(instance, now)
