"""Admission control: how many requests run at once, and how many wait.

`AdmissionQueue` is pure and makes the decision. A bounded number of requests runs, a bounded number
waits, and each tenant has a limit of its own. Requests of one tenant are admitted in order of
arrival; tenants take turns, so a tenant with many requests delays only its own requests.
`AdmissionController` is the shell: each waiting request is a coroutine that waits on a future until
it is admitted or times out. Used on the event loop only.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from kvferry.config.fields import Count, Natural, check_fields
from kvferry.errors import LocalProtocolError

_SMOOTHING = 0.1
"""Weight of the newest sample in the moving average of service times."""
_RETRY_BOUNDS_S = (1, 60)
"""Smallest and largest `Retry-After` sent to a client."""


@dataclass(frozen=True, slots=True)
class AdmissionOptions:
    """Limits on running and waiting requests."""

    max_running: Count = 1024
    """Requests that run on instances at the same time."""
    max_waiting: Natural = 1024
    """Requests that may wait for admission. Further requests get 503."""
    tenant_running: Count | None = None
    """Running requests of one tenant. None: only `max_running` applies."""
    tenant_waiting: Natural | None = None
    """Waiting requests of one tenant. Further requests of the tenant get 429. None: half of
    `max_waiting` if the router has API keys, else no limit.
    """

    def __post_init__(self) -> None:
        check_fields(self)


class RefusalReason(StrEnum):
    """Why a request was not admitted."""

    TENANT = "tenant"
    """The tenant already has `tenant_waiting` requests in the queue."""
    FULL = "full"
    """The queue already holds `max_waiting` requests."""
    LATE = "late"
    """The request was still waiting when its timeout ran out."""
    CLOSING = "closing"
    """The router is shutting down."""


@dataclass(frozen=True, slots=True)
class AdmissionRefused:
    """A request was not admitted; the client may retry after `retry_after_s` seconds."""

    reason: RefusalReason
    retry_after_s: int

    @property
    def status(self) -> int:
        return 429 if self.reason is RefusalReason.TENANT else 503


@dataclass(slots=True, eq=False)
class AdmissionSlot:
    """Place of one request in the admission queue; the request waits until `is_admitted`.

    The caller passes the slot to `leave` exactly once, whether the request was admitted or not.
    """

    tenant: str
    admitted_at: float | None = None
    is_over: bool = False

    @property
    def is_admitted(self) -> bool:
        return self.admitted_at is not None


@dataclass(slots=True)
class AdmissionQueue:
    """Pure admission decision: which requests run, which wait, which are refused."""

    options: AdmissionOptions
    num_running: int = field(default=0, init=False)
    num_waiting: int = field(default=0, init=False)
    _running: dict[str, int] = field(default_factory=dict, init=False)
    _waiting: OrderedDict[str, deque[AdmissionSlot]] = field(
        default_factory=OrderedDict, init=False
    )
    """Waiting slots per tenant, for tenants that wait; the tenant whose turn is next is first."""
    _mean_s: float = field(default=0.0, init=False)
    """Moving average of the time from admission to `leave`."""

    def arrive(self, tenant: str, now: float) -> AdmissionSlot | AdmissionRefused:
        """Admit the request, queue the request, or refuse the request.

        A free place goes to the new request at once. No waiting request is overtaken: while a
        place is free, only tenants at their `tenant_running` limit have requests in the queue.
        """
        admitted = self.admit_if_free(tenant, now)
        if admitted is not None:
            return admitted
        own = self._waiting.get(tenant, ())
        if self.options.tenant_waiting is not None and len(own) >= self.options.tenant_waiting:
            return AdmissionRefused(
                RefusalReason.TENANT, self.estimate_s(len(own), self.options.tenant_running)
            )
        if self.num_waiting >= self.options.max_waiting:
            return AdmissionRefused(RefusalReason.FULL, self.estimate_s(self.num_waiting))
        entry = AdmissionSlot(tenant)
        self._waiting.setdefault(tenant, deque()).append(entry)
        self.num_waiting += 1
        return entry

    def admit_if_free(self, tenant: str, now: float) -> AdmissionSlot | None:
        """Admit a request if a place is free for the tenant now; None otherwise."""
        if self.num_running >= self.options.max_running or not self._may_run(tenant):
            return None
        entry = AdmissionSlot(tenant)
        self._admit(entry, now)
        return entry

    def leave(self, entry: AdmissionSlot, now: float) -> list[AdmissionSlot]:
        """Remove a finished or abandoned request; return the slots admitted in its place."""
        if entry.is_over:
            raise LocalProtocolError("a request left the router twice")
        entry.is_over = True
        if entry.admitted_at is None:
            self._unqueue(entry)
            return []
        # The first sample replaces the initial 0; later samples are smoothed.
        self._mean_s += (now - entry.admitted_at - self._mean_s) * (
            _SMOOTHING if self._mean_s else 1
        )
        self.num_running -= 1
        self._running[entry.tenant] -= 1
        if not self._running[entry.tenant]:
            del self._running[entry.tenant]
        return self._admit_next(now)

    def estimate_s(self, num_ahead: int, num_places: int | None = None) -> int:
        """Seconds until a place may be free behind `num_ahead` requests.

        The estimate is the mean service time multiplied by the requests ahead, divided by the
        `num_places` that run in parallel, clamped to `_RETRY_BOUNDS_S`.
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
            # Skip tenants at their own limit; the dict order is the order of turns.
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
    """Shell around `AdmissionQueue`: makes requests wait as coroutines.

    While a place is free, `enter` returns without yielding to the event loop.
    """

    def __init__(self, options: AdmissionOptions, clock: Callable[[], float]) -> None:
        """`clock` returns local monotonic seconds."""
        self.queue = AdmissionQueue(options)
        self._clock = clock
        self.is_closing = False
        self._waiters: dict[AdmissionSlot, asyncio.Future[None]] = {}

    def close(self) -> None:
        """Refuse every new request from now on; requests admitted or waiting are not affected."""
        self.is_closing = True

    async def enter(self, tenant: str, timeout_s: float) -> AdmissionSlot | AdmissionRefused:
        """Wait for admission: an admitted slot, which the caller passes to `leave`, or the refusal.

        A cancelled wait leaves no slot in the queue.
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
            if not entry.is_admitted:  # else the slot was admitted in the tick of the timeout
                self.leave(entry)
                return AdmissionRefused(
                    RefusalReason.LATE, self.queue.estimate_s(self.queue.num_waiting)
                )
        except asyncio.CancelledError:
            # If the slot was admitted in the same tick, `leave` passes its place on.
            self.leave(entry)
            raise
        finally:
            del self._waiters[entry]
        return entry

    def enter_if_free(self, tenant: str) -> AdmissionSlot | None:
        """An admitted slot, which the caller passes to `leave`, if a place is free now."""
        return None if self.is_closing else self.queue.admit_if_free(tenant, self._clock())

    def leave(self, entry: AdmissionSlot) -> None:
        for admitted in self.queue.leave(entry, self._clock()):
            waiter = self._waiters[admitted]
            if (
                not waiter.done()
            ):  # done: cancelled in this tick; `enter` calls `leave` and passes the place on
                waiter.set_result(None)
