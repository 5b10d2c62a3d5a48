"""Circuit breaker of one instance: whether the instance is given requests.

The fleet (`fleet.py`) may veto an ejection: the last usable instance of a role is never ejected.

```
           failures in a row, a large share of failures, or failed probes
  closed ───────────────────────────────────────────────────────────▶ ejected
    ▲  ▲                                                               │  ▲
    │  └── a leg given as last resort is answered ─────────────────────┤  │ trial or probe fails
    │                                                                  ▼  │
    └────────────────── the trial leg is answered ────────────────── half open
```

The time of an ejection doubles each time, up to a cap. A half-open instance is given one trial leg
at a time. A refusal (503) starts a cooldown and does not open the breaker.

With probes enabled, an ejected instance becomes half open when its time has passed and a probe
succeeded. If no probe succeeds, the instance becomes half open only `longest_ejection_s` later,
because a probe may be wrong where a request is right; a dead instance thus gets almost no client
requests. An instance whose probes failed and now succeed becomes half open at once. If the instance
was never reached, or was ejected by probes alone, the first successful probe closes the breaker.
Results of legs that began before the last ejection are ignored.

Pure: the caller passes `now` (local monotonic seconds) and the random source. Used on one thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from kvferry.config.fields import Count, Seconds, Share, Timeout, check_fields
from kvferry.router.fleet.instances import COOLDOWN_S


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """Thresholds and times of the breaker and of the probes."""

    failures_in_a_row: Count = 3
    """Consecutive failed legs that eject an instance."""
    failure_share: Share = 0.5
    """Share of failed legs within `window_s` that ejects an instance."""
    window_s: Seconds = 10.0
    """Seconds over which `failure_share` is measured. The share catches an instance that
    answers only every other request.
    """
    window_legs: Count = 10
    """Minimum number of legs in the window for `failure_share` to apply."""
    first_ejection_s: Seconds = 2.0
    """Seconds of the first ejection; each further ejection lasts twice as long."""
    longest_ejection_s: Seconds = 60.0
    """Upper limit of an ejection in seconds."""
    jitter: Share = 0.2
    """Share by which an ejection is randomly shortened, so that instances that failed together do
    not return together.
    """
    backoff_reset_s: Timeout = 60.0
    """Seconds after the last ejection until the next one is `first_ejection_s` long again."""
    probe_interval_s: Timeout = 5.0
    """Seconds between two probes of a healthy instance. 0: no probes."""
    probe_ejected_s: Seconds = 1.0
    """Seconds between two probes of an instance that is ejected, unhealthy or not yet reached."""
    max_failed_probes: Count = 2
    """Consecutive failed probes that eject an instance."""
    stall_s: Seconds = 60.0
    """A request that times out counts against an instance that has computed no token since the
    request came, this many seconds ago or more: its engine hangs.
    """

    def __post_init__(self) -> None:
        check_fields(self)


class BreakerPhase(Enum):
    """State of a breaker; see the diagram of the module."""

    CLOSED = auto()
    EJECTED = auto()
    HALF_OPEN = auto()


@dataclass(slots=True)
class _Window:
    """Number of legs and failures over the last one to two half windows.

    Two counters that age as a whole are cheap, and precise enough.
    """

    half_s: float
    _ends_at: float = -inf
    _legs: list[int] = field(default_factory=lambda: [0, 0])
    _failures: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, num_failed: int, now: float) -> None:
        if now >= self._ends_at:
            is_adjacent = now < self._ends_at + self.half_s
            self._legs = [0, self._legs[0] if is_adjacent else 0]
            self._failures = [0, self._failures[0] if is_adjacent else 0]
            self._ends_at = now + self.half_s
        self._legs[0] += 1
        self._failures[0] += num_failed

    def exceeds(self, share: float, num_legs: int) -> bool:
        return sum(self._legs) >= num_legs and sum(self._failures) >= share * sum(self._legs)

    def clear(self) -> None:
        self._ends_at = -inf
        self._legs, self._failures = [0, 0], [0, 0]


@dataclass(slots=True)
class Breaker:
    """Breaker of one instance.

    `not_before` is the time from which the instance may be given a leg: in the past while the
    instance is healthy, infinity while a trial leg runs.
    """

    options: HealthOptions
    draw: Callable[[], float]
    """Random numbers from 0 to below 1."""
    phase: BreakerPhase = BreakerPhase.CLOSED
    not_before: float = -inf
    cooldown_until: float = -inf
    """End of the cooldown after a refusal."""
    ejected_until: float = -inf
    """Time at which the last ejection ended or will end."""
    num_ejections: int = 0
    generation: int = 0
    """Grows with each ejection and restart; results of legs of an older generation are ignored."""
    failures_in_a_row: int = 0
    failed_probes_in_a_row: int = 0
    is_reached: bool = False
    """True once a leg or a probe was answered; until then the instance is only configured."""
    _is_absent: bool = False
    """True if the instance was ejected because it did not answer probes or was never reached, not
    because of failed legs.
    """
    _streak: int = 0
    """Number of ejections since the last backoff reset."""
    _window: _Window = field(init=False)

    def __post_init__(self) -> None:
        self._window = _Window(self.options.window_s / 2)

    @property
    def is_suspect(self) -> bool:
        """True if the instance would be ejected, but the role cannot spare the instance."""
        is_bad = (
            self.failures_in_a_row >= self.options.failures_in_a_row
            or self.failed_probes_in_a_row >= self.options.max_failed_probes
        )
        return is_bad and self.phase is BreakerPhase.CLOSED

    @property
    def is_reachable(self) -> bool:
        """True if the instance was reached and no probes have failed since. Always True if probes
        are disabled.
        """
        if not self.options.probe_interval_s:
            return True
        return self.is_reached and self.failed_probes_in_a_row < self.options.max_failed_probes

    @property
    def wants_probes(self) -> bool:
        """True if the next probe can change the state and should come soon."""
        return (
            self.phase is not BreakerPhase.CLOSED
            or not self.is_reached
            or self.failed_probes_in_a_row > 0
        )

    def phase_at(self, now: float) -> BreakerPhase:
        """The phase, with an ejection that has run out shown as half open."""
        return (
            BreakerPhase.HALF_OPEN
            if self.phase is BreakerPhase.EJECTED and self.not_before <= now
            else self.phase
        )

    def begin(self, now: float) -> bool:
        """Record that a leg is given to the instance; True if the leg is the trial."""
        if self.phase is BreakerPhase.CLOSED or self.not_before > now:
            return False
        self.phase = BreakerPhase.HALF_OPEN
        self.not_before = inf
        return True

    def note_answer(self, generation: int, now: float) -> None:
        """Record that a leg of this generation is being answered. The first bytes of a stream count
        as much as its end.
        """
        if generation != self.generation:
            return
        self.failures_in_a_row = 0
        self.failed_probes_in_a_row = 0
        self.is_reached = True
        if self.phase is BreakerPhase.CLOSED:
            self._window.add(0, now)
        else:
            self._close()

    def note_refusal(self, now: float) -> None:
        """Start a cooldown. A later answer does not end the cooldown, because a draining instance
        still answers legs accepted earlier.
        """
        self.cooldown_until = now + COOLDOWN_S

    def end_trial(self, generation: int, now: float) -> None:
        """Let the next leg be the trial if this one was neither answered nor failed."""
        if generation == self.generation and self.phase is BreakerPhase.HALF_OPEN:
            self.not_before = now

    def note_failure(self, generation: int, now: float) -> bool:
        """Record a failed leg of this generation; True if the instance should be ejected."""
        if generation != self.generation or self.phase is BreakerPhase.EJECTED:
            return False
        self.failures_in_a_row += 1
        if self.phase is BreakerPhase.HALF_OPEN:
            return True
        self._window.add(1, now)
        options = self.options
        return self.failures_in_a_row >= options.failures_in_a_row or self._window.exceeds(
            options.failure_share, options.window_legs
        )

    def eject(self, now: float, is_absent: bool = False) -> None:
        """Eject the instance for a time that grows with each ejection in a row."""
        options = self.options
        self._is_absent = not self.is_reached or (
            is_absent and self.phase is BreakerPhase.CLOSED and not self.failures_in_a_row
        )
        if (
            self.phase is BreakerPhase.CLOSED
            and now - self.ejected_until >= options.backoff_reset_s
        ):
            self._streak = 0
        whole = min(
            options.longest_ejection_s, options.first_ejection_s * 2.0 ** min(self._streak, 30)
        )
        self._streak += 1
        self.num_ejections += 1
        self.generation += 1
        self.phase = BreakerPhase.EJECTED
        self.ejected_until = now + whole * (1 - options.jitter * self.draw())
        # With probes, the end of the ejection alone is not enough: see the module docstring.
        self.not_before = self._unprobed_end() if options.probe_interval_s else self.ejected_until

    def note_probe_passed(self, now: float) -> None:
        """Record a successful probe, which may close the breaker or end the ejection."""
        was_down = self.failed_probes_in_a_row > 0
        self.failed_probes_in_a_row = 0
        self.is_reached = True
        if self.phase is BreakerPhase.CLOSED:
            return
        if self._is_absent:
            self._close()
        elif self.phase is BreakerPhase.EJECTED:
            self.ejected_until = now if was_down else self.ejected_until
            self.not_before = self.ejected_until

    def note_probe_failed(self) -> bool:
        """Record a failed probe; True if the instance should be ejected. A running trial leg is
        the better evidence, so a half-open instance is not ejected while the trial runs.
        """
        self.failed_probes_in_a_row += 1
        if self.phase is BreakerPhase.EJECTED:
            self.not_before = self._unprobed_end()
            return False
        if self.phase is BreakerPhase.HALF_OPEN:
            return self.not_before < inf
        return self.failed_probes_in_a_row >= self.options.max_failed_probes

    def restart(self) -> None:
        """Reset everything: a new incarnation answers at the address. Results of legs of the old
        incarnation are ignored.
        """
        self.generation += 1
        self._streak = 0
        self.is_reached = True
        self.failed_probes_in_a_row = 0
        self.cooldown_until = -inf
        self._close()

    def _unprobed_end(self) -> float:
        """When an ejected instance becomes half open although no probe succeeded."""
        return self.ejected_until + self.options.longest_ejection_s

    def _close(self) -> None:
        self.phase = BreakerPhase.CLOSED
        self.not_before = -inf
        self.failures_in_a_row = 0
        self._window.clear()
