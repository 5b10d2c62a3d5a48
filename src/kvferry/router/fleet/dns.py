"""Looks up the DNS names of services and lets the fleet follow the answers.

Uses the system's resolver (`getaddrinfo`), so `/etc/resolv.conf`, search domains and `/etc/hosts`
apply. It blocks, for up to half a minute when name servers are silent, so each lookup has a thread
of its own, which ends with the lookup; there is at most one per name. All else runs on the event
loop.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.logs import repeats_of
from kvferry.router.fleet.services import DiscoveredInstances, DiscoveryOptions, ServiceName

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServiceResolver:
    """Follows the services of a router."""

    services: Sequence[ServiceName]
    options: DiscoveryOptions
    discovered: DiscoveredInstances
    on_change: Callable[[], None]
    """Called when instances have joined or left."""
    _lookups: dict[ServiceName, "_Lookup"] = field(default_factory=dict)
    """Lookups without an answer so far."""
    _failures: dict[ServiceName, str] = field(default_factory=dict)
    """Why the last lookup of a service gave no address; logged when it changes."""

    async def run(self) -> None:
        """Look the names up, again and again, until cancelled."""
        services = set(self.services)  # an operator may name one service twice
        try:
            while services:
                await asyncio.gather(*map(self._refresh, services))
                for instance in self.discovered.remove_drained():
                    _log.info("instance has left the fleet instance=%s", instance.url)
                await asyncio.sleep(self.options.interval_s)
        finally:
            for lookup in self._lookups.values():
                lookup.answer.cancel()

    async def _refresh(self, service: ServiceName) -> None:
        lookup = self._lookups.get(service)
        if lookup is None:
            lookup = _Lookup(service, asyncio.get_running_loop())
            try:
                lookup.start()
            except RuntimeError as error:  # the system allows no more threads
                self._note_failure(service, str(error))
                return
            self._lookups[service] = lookup
        await asyncio.wait({lookup.answer}, timeout=self.options.timeout_s)
        if not lookup.answer.done():
            self._note_failure(service, f"no answer within {self.options.timeout_s:g} s")
            return
        del self._lookups[service]
        try:
            hosts = lookup.answer.result()
        except (OSError, UnicodeError) as error:
            self._note_failure(service, getattr(error, "strerror", None) or str(error))
            return
        if self.discovered.has_own(service, hosts):
            _log.warning(
                "service=%s has this router's own address, which the router leaves out",
                service,
                extra=repeats_of(service),
            )
        if self._failures.pop(service, None) is not None:
            _log.info("the service has addresses again service=%s", service)
        if self.discovered.update(service, hosts, time.monotonic()):
            _log.info("instances of service=%s: %s", service, ", ".join(sorted(hosts)))
            self.on_change()

    def _note_failure(self, service: ServiceName, reason: str) -> None:
        if self._failures.get(service) != reason:
            self._failures[service] = reason
            _log.warning(
                "no address for service=%s (%s): the known instances stay", service, reason
            )


class _Lookup:
    """One lookup in a thread of its own. The thread is a daemon: it must not delay the router's
    exit.
    """

    def __init__(self, service: ServiceName, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[frozenset[str]] = loop.create_future()
        self._service = service
        self._loop = loop

    def start(self) -> None:
        threading.Thread(target=self._run, name="kvferry-dns", daemon=True).start()

    def _run(self) -> None:
        try:
            hosts: frozenset[str] | Exception = _addresses(self._service.name)
        except (OSError, UnicodeError) as error:
            hosts = error
        except Exception as error:  # without an answer, the name would never be looked up again
            hosts = OSError(f"the lookup failed: {error!r}")
        # The loop is closed if the router has ended meanwhile.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._finish, hosts)

    def _finish(self, hosts: frozenset[str] | Exception) -> None:
        if self.answer.done():
            return
        if isinstance(hosts, Exception):
            self.answer.set_exception(hosts)
        else:
            self.answer.set_result(hosts)


def _addresses(name: str) -> frozenset[str]:
    """The addresses of a name, of one family: a pod with two families is one instance, not two."""
    infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, where in infos:
        by_family.setdefault(family, set()).add(str(where[0]))
    found = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or set()
    return frozenset(found)
