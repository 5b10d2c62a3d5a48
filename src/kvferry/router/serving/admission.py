"""How many requests are served at once, and who waits for how long.

`AdmissionQueue` decides, purely: a bounded number of requests runs, a bounded number waits, of each
tenant not more than its share. A tenant's requests are admitted in the order they came; tenants
take turns, so that whoever sends much waits for itself. `AdmissionController` is the shell that
makes a waiting request a waiting coroutine, and ends its waiting in time. One thread, the event
loop's.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from kvferry.errors import ConfigError, LocalProtocolError

__all__ = [
    "AdmissionController",
    "AdmissionOptions",
    "AdmissionQueue",
    "AdmissionRefused",
    "AdmissionSlot",
    "RefusalReason",
]

_SMOOTHING = 0.1
_RETRY_BOUNDS_S = (1, 60)


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    max_running: int = 1024
    """Requests that instances work on."""
    max_waiting: int = 1024
    """Requests that wait for one of those to end. Beyond it: 503."""
    tenant_running: int | None = None
    """The same for one tenant; without it, as many as there is room for."""
    tenant_waiting: int | None = None
    """Likewise. Beyond it: 429."""

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_waiting < 0:
            raise ConfigError(
                "max_running must be at least 1 and max_waiting at least 0, got "
                f"{self.max_running} and {self.max_waiting}"
            )
        if (self.tenant_running is not None and self.tenant_running < 1) or (
            self.tenant_waiting is not None and self.tenant_waiting < 0
        ):
            raise ConfigError("tenant_running must be at least 1 and tenant_waiting at least 0")


class RefusalReason(StrEnum):
    TENANT = "tenant"
    """This tenant has as many waiting as it may."""
    FULL = "full"
    LATE = "late"
    """It waited until its deadline."""
    CLOSING = "closing"


@dataclass(frozen=True, slots=True)
class AdmissionRefused:
    """Not served, and how many seconds from now that may be different."""

    reason: RefusalReason
    retry_after_s: int

    @property
    def status(self) -> int:
        return 429 if self.reason is RefusalReason.TENANT else 503


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """One request's place: waiting until `is_admitted`. Whoever got it hands it back by `leave`,
    once, in either case.
    """

    tenant: str
    admitted_at: float | None = None
    is_over: bool = False

    @property
    def is_admitted(self) -> bool:
        return self.admitted_at is not None


@dataclass(slots=True)
class AdmissionQueue:
    options: AdmissionOptions
    num_running: int = field(default=0, init=False)
    num_waiting: int = field(default=0, init=False)
    _running: dict[str, int] = field(default_factory=dict, init=False)
    _waiting: OrderedDict[str, deque[AdmissionSlot]] = field(
        default_factory=OrderedDict, init=False
    )
    """Of tenants with someone waiting; first the one whose turn it is."""
    _mean_s: float = field(default=0.0, init=False)

    def arrive(self, tenant: str, now: float) -> AdmissionSlot | AdmissionRefused:
        """Runs, waits or goes. Nobody overtakes who waits: beside a free place wait only tenants
        that run as many as they may.
        """
        entry = AdmissionSlot(tenant)
        if self.num_running < self.options.max_running and self._may_run(tenant):
            self._admit(entry, now)
            return entry
        own = self._waiting.get(tenant, ())
        if self.options.tenant_waiting is not None and len(own) >= self.options.tenant_waiting:
            return AdmissionRefused(
                RefusalReason.TENANT, self.estimate_s(len(own), self.options.tenant_running)
            )
        if self.num_waiting >= self.options.max_waiting:
            return AdmissionRefused(RefusalReason.FULL, self.estimate_s(self.num_waiting))
        self._waiting.setdefault(tenant, deque()).append(entry)
        self.num_waiting += 1
        return entry

    def leave(self, entry: AdmissionSlot, now: float) -> list[AdmissionSlot]:
        """It is done, or does not want to wait any longer; whom that admits."""
        if entry.is_over:
            raise LocalProtocolError("a request left the router twice")
        entry.is_over = True
        if entry.admitted_at is None:
            self._unqueue(entry)
            return []
        self._mean_s += (now - entry.admitted_at - self._mean_s) * (
            _SMOOTHING if self._mean_s else 1
        )
        self.num_running -= 1
        self._running[entry.tenant] -= 1
        if not self._running[entry.tenant]:
            del self._running[entry.tenant]
        return self._admit_next(now)

    def estimate_s(self, num_ahead: int, num_places: int | None = None) -> int:
        """After how many seconds there may be room behind so many: as long as they take at the
        present pace, in so many places at once.
        """
        least, most = _RETRY_BOUNDS_S
        num_places = min(num_places or self.options.max_running, self.options.max_running)
        return max(least, min(most, ceil(self._mean_s * (num_ahead + 1) / num_places)))

    def num_waiting_of(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def num_running_of(self, tenant: str) -> int:
        return self._running.get(tenant, 0)

    def _may_run(self, tenant: str) -> bool:
        return (
            self.options.tenant_running is None
            or self.num_running_of(tenant) < self.options.tenant_running
        )

    def _admit(self, entry: AdmissionSlot, now: float) -> None:
        entry.admitted_at = now
        self.num_running += 1
        self._running[entry.tenant] = self.num_running_of(entry.tenant) + 1

    def _admit_next(self, now: float) -> list[AdmissionSlot]:
        admitted: list[AdmissionSlot] = []
        while self.num_running < self.options.max_running:
            tenant = next((tenant for tenant in self._waiting if self._may_run(tenant)), None)
            if tenant is None:
                break
            entry = self._waiting[tenant][0]
            self._unqueue(entry)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            self._admit(entry, now)
            admitted.append(entry)
        return admitted

    def _unqueue(self, entry: AdmissionSlot) -> None:
        queue = self._waiting[entry.tenant]
        queue.remove(entry)
        self.num_waiting -= 1
        if not queue:
            del self._waiting[entry.tenant]


class AdmissionController:
    """`enter` returns at once while there is room, without giving way to other coroutines."""

    def __init__(self, options: AdmissionOptions, clock: Callable[[], float]) -> None:
        """`clock`: local monotonic seconds."""
        self.queue = AdmissionQueue(options)
        self._clock = clock
        self.is_closing = False
        self._waiters: dict[AdmissionSlot, asyncio.Future[None]] = {}

    def close(self) -> None:
        """From now on everybody is refused who is not admitted or waiting already."""
        self.is_closing = True

    async def enter(self, tenant: str, timeout_s: float) -> AdmissionSlot | AdmissionRefused:
        """A pass that is admitted, to be handed to `leave`, or why not. A cancelled wait leaves
        nothing behind.
        """
        if self.is_closing:
            return AdmissionRefused(RefusalReason.CLOSING, 1)
        entry = self.queue.arrive(tenant, self._clock())
        if isinstance(entry, AdmissionRefused) or entry.is_admitted:
            return entry
        self._waiters[entry] = admitted = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await admitted
        except TimeoutError:
            if not entry.is_admitted:  # else its turn came in the same moment
                self.leave(entry)
                return AdmissionRefused(
                    RefusalReason.LATE, self.queue.estimate_s(self.queue.num_waiting)
                )
        except asyncio.CancelledError:
            self.leave(entry)
            raise
        finally:
            del self._waiters[entry]
        return entry

    def leave(self, entry: AdmissionSlot) -> None:
        for admitted in self.queue.leave(entry, self._clock()):
            waiter = self._waiters[admitted]
            if (
                not waiter.done()
            ):  # a waiter that was cancelled in the same moment hands its pass on
                waiter.set_result(None)
