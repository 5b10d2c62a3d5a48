"""Services: DNS names whose addresses are the instances of one role.

A headless service of Kubernetes has such a name; its records are the pods that are ready. An
address that appears joins the fleet. An address that disappears is drained, and removed when its
last leg has ended. No answer, and an answer without addresses, change nothing: a name server that
fails must not empty a fleet that serves. An instance that an operator has drained stays as it is.

Pure: the caller looks names up and passes `now` (local monotonic seconds).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvferry.config.fields import Seconds, check_fields
from kvferry.errors import ConfigError
from kvferry.router.fleet.fleet import Fleet
from kvferry.router.fleet.instances import Instance, Role, parse_instance
from kvferry.types import Address

_SCHEME = "dns"


@dataclass(frozen=True, slots=True)
class DiscoveryOptions:
    """How often the names of services are looked up."""

    interval_s: Seconds = 5.0
    """Seconds between two lookups of a DNS name."""
    timeout_s: Seconds = 5.0
    """Time for one lookup. Without an answer, the known instances stay."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class ServiceName:
    """A DNS name; each of its addresses is an instance that listens on `port`."""

    role: Role
    name: str
    port: int

    def __str__(self) -> str:
        return f"{_SCHEME}://{self.name}:{self.port}"


def parse_member(role: Role, url: str) -> Instance | ServiceName:
    """Parse `dns://NAME:PORT`, or the address of one instance; ConfigError otherwise."""
    if not url.lower().startswith(f"{_SCHEME}://"):
        return parse_instance(role, url)
    try:
        is_complete = urlsplit(url).port is not None
        # A name and a port have the same form in both.
        address = parse_instance(role, f"http{url[len(_SCHEME) :]}").address
    except (ConfigError, ValueError):
        is_complete, address = False, Address("", 0)
    if not is_complete:
        raise ConfigError(f"{url!r:.200} is not the name of a {role} service; give dns://NAME:PORT")
    return ServiceName(role, address.host, address.port)


def _instances(service: ServiceName, hosts: Collection[str]) -> list[Instance]:
    return [Instance(service.role, Address(host, service.port)) for host in hosts]


@dataclass(slots=True)
class DiscoveredInstances:
    """Applies the answers of name servers to the fleet. Instances that an operator named or drained
    are left alone.
    """

    fleet: Fleet
    on_removed: Callable[[Instance], object]
    """Called when an instance was removed from the fleet."""
    _listed: dict[ServiceName, frozenset[Instance]] = field(default_factory=dict)
    """The instances of the last answer with addresses."""
    _added: set[Instance] = field(default_factory=set)
    """The members that were added here, those that leave included."""
    _leaving: set[Instance] = field(default_factory=set)

    def update(self, service: ServiceName, hosts: Collection[str], now: float) -> bool:
        """Apply the addresses of a service; True if they have changed. No address is no change, and
        neither is the address of the router itself.
        """
        found = _instances(service, hosts)
        after = frozenset(instance for instance in found if not self.fleet.is_own(instance))
        if not after:
            return False
        before = self._listed.get(service, frozenset())
        self._listed[service] = after
        for instance in sorted(after - before, key=str):
            self._join(instance, now)
        still_listed = frozenset().union(*self._listed.values())
        for instance in (before - still_listed) & self._added:
            self.fleet.leave(instance)
            self._leaving.add(instance)
        return before != after

    def has_own(self, service: ServiceName, hosts: Collection[str]) -> bool:
        """Whether one of the addresses is the router's own."""
        return any(map(self.fleet.is_own, _instances(service, hosts)))

    def _join(self, instance: Instance, now: float) -> None:
        was_leaving = instance in self._leaving
        self._leaving.discard(instance)
        member = self.fleet.get(instance)
        if self._is_drained_by_operator(instance):
            return
        if member is None or not member.is_static or was_leaving:
            self.fleet.add(instance, now)
            self._added.add(instance)

    def remove_drained(self) -> list[Instance]:
        """Remove and return the instances that have left and whose last leg has ended."""
        drained = [
            instance
            for instance in self._leaving
            if self.fleet.is_drained(instance) and not self._is_drained_by_operator(instance)
        ]
        for instance in drained:
            self._leaving.remove(instance)
            self._added.remove(instance)
            self.fleet.remove(instance)
            self.on_removed(instance)
        return drained

    def _is_drained_by_operator(self, instance: Instance) -> bool:
        """Whether an operator has drained the instance. Only an operator undoes that: the member is
        kept while its address is gone, because it would return as a new one.
        """
        member = self.fleet.get(instance)
        return member is not None and member.is_drained_by_operator
