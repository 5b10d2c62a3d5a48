"""Whether one instance is given requests: a breaker that opens on failures, rests after refusals,
and closes after one good trial.

```
             failures in a row, or too large a share of them, or failed probes
  closed ────────────────────────────────────────────────────────────────▶ ejected, for a time that doubles up to a cap
    ▲  ▲                                                                      │  ▲
    │  └── a leg that it was given as a last resort is answered ──────────────┤  │ the trial fails, or a probe is ill
    │                                                                         ▼  │
    └───────────────────── the trial is answered ───────────────────────── half open: one trial leg at a time
```

With probes an instance whose time is over is half open when one of them found it well, else only a
long time later, as a probe may be wrong where a request is right: a dead one is given next to no
request of a client. One that was seen down and is up again need not wait for the end of its time,
and where nothing but probes, or nothing at all, had ever been heard of it, the probe that finds it
closes. Legs begun before the instance was ejected say nothing about it since. Pure: the caller
passes `now` (local monotonic seconds) and chance. One thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from kvferry.errors import ConfigError
from kvferry.router.fleet.instances import COOLDOWN_S

__all__ = ["Breaker", "BreakerPhase", "HealthOptions"]

_POSITIVE = (
    "failures_in_a_row",
    "window_s",
    "window_legs",
    "first_ejection_s",
    "longest_ejection_s",
    "probe_ejected_s",
    "max_failed_probes",
)


@dataclass(frozen=True, slots=True)
class HealthOptions:
    failures_in_a_row: int = 3
    """As many legs that failed one after the other open the breaker."""
    failure_share: float = 0.5
    """Of the legs of a while; see `window_s`."""
    window_s: float = 10.0
    """So does this share of the legs of about this time, once there are `window_legs`: an instance
    that answers every other request.
    """
    window_legs: int = 10
    """Fewer say nothing."""
    first_ejection_s: float = 2.0
    """How long an instance is left out the first time; twice as long each further time."""
    longest_ejection_s: float = 60.0
    """At most."""
    jitter: float = 0.2
    """An ejection is shorter by up to this share, so that instances that failed together do not
    come back together.
    """
    backoff_reset_s: float = 60.0
    """So long after its last ejection ended an instance starts again with the first one's time."""
    probe_interval_s: float = 5.0
    """0: no probes."""
    probe_ejected_s: float = 1.0
    """Between two looks at an instance that is left out, was found unhealthy, or has not been
    reached yet.
    """
    max_failed_probes: int = 2
    """As many in a row leave it out."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}")
        for name in ("failure_share", "jitter"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.probe_interval_s < 0 or self.backoff_reset_s < 0:
            raise ConfigError("probe_interval_s and backoff_reset_s must not be negative")


class BreakerPhase(Enum):
    CLOSED = auto()
    EJECTED = auto()
    HALF_OPEN = auto()


@dataclass(slots=True)
class _Window:
    """Legs and failures of the last one to two halves of a window. Two counters age as a whole,
    which is cheap and good enough.
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
    """Of one instance. `not_before`: when it may be given a leg; in the past while nothing is
    wrong, never while a trial is under way.
    """

    options: HealthOptions
    draw: Callable[[], float]
    phase: BreakerPhase = BreakerPhase.CLOSED
    not_before: float = -inf
    cooldown_until: float = -inf
    ejected_until: float = -inf
    """When the last ejection ended or is to end."""
    num_ejections: int = 0
    generation: int = 0
    """Grows with each ejection and restart: tells legs begun before from those begun after."""
    failures_in_a_row: int = 0
    failed_probes_in_a_row: int = 0
    is_reached: bool = False
    """A leg was answered, or a probe: it is more than a line in a configuration."""
    _is_absent: bool = False
    """It was ejected because it did not answer probes, or because nobody was there yet; not because
    it answered legs badly.
    """
    _streak: int = 0
    _window: _Window = field(init=False)

    def __post_init__(self) -> None:
        self._window = _Window(self.options.window_s / 2)

    @property
    def is_suspect(self) -> bool:
        """It would be ejected if its role could spare it."""
        is_bad = (
            self.failures_in_a_row >= self.options.failures_in_a_row
            or self.failed_probes_in_a_row >= self.options.max_failed_probes
        )
        return is_bad and self.phase is BreakerPhase.CLOSED

    @property
    def is_reachable(self) -> bool:
        """Somebody has reached it and nothing says that it has gone since. Where there are no
        probes, that is taken on trust.
        """
        if not self.options.probe_interval_s:
            return True
        return self.is_reached and self.failed_probes_in_a_row < self.options.max_failed_probes

    @property
    def wants_probes(self) -> bool:
        """The next look at it may change what is thought of it."""
        return (
            self.phase is not BreakerPhase.CLOSED
            or not self.is_reached
            or self.failed_probes_in_a_row > 0
        )

    def phase_at(self, now: float) -> BreakerPhase:
        """An ejection ends by itself; whoever looks sees it."""
        return (
            BreakerPhase.HALF_OPEN
            if self.phase is BreakerPhase.EJECTED and self.not_before <= now
            else self.phase
        )

    def begin(self, now: float) -> bool:
        """A leg is given to the instance; True when it is the trial."""
        if self.phase is BreakerPhase.CLOSED or self.not_before > now:
            return False
        self.phase = BreakerPhase.HALF_OPEN
        self.not_before = inf
        return True

    def note_answer(self, generation: int, now: float) -> None:
        """A leg begun in that era is being answered: a stream's first segment is as good as its
        last.
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
        """A later answer does not end the rest: an instance that drains still answers what it had
        taken before.
        """
        self.cooldown_until = now + COOLDOWN_S

    def end_trial(self, generation: int, now: float) -> None:
        """Where it was neither answered nor failed, the next may try."""
        if generation == self.generation and self.phase is BreakerPhase.HALF_OPEN:
            self.not_before = now

    def note_failure(self, generation: int, now: float) -> bool:
        """Of a leg begun in that era; whether it is one too many."""
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
        self.not_before = self._unprobed_end() if options.probe_interval_s else self.ejected_until

    def note_probe_passed(self, now: float) -> None:
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
        """Whether it is to be ejected for that. A trial that is under way knows better."""
        self.failed_probes_in_a_row += 1
        if self.phase is BreakerPhase.EJECTED:
            self.not_before = self._unprobed_end()
            return False
        if self.phase is BreakerPhase.HALF_OPEN:
            return self.not_before < inf
        return self.failed_probes_in_a_row >= self.options.max_failed_probes

    def restart(self) -> None:
        """Another incarnation: nothing that is known holds any more. Legs of the last one say
        nothing about this one.
        """
        self.generation += 1
        self._streak = 0
        self.is_reached = True
        self.failed_probes_in_a_row = 0
        self.cooldown_until = -inf
        self._close()

    def _unprobed_end(self) -> float:
        return self.ejected_until + self.options.longest_ejection_s

    def _close(self) -> None:
        self.phase = BreakerPhase.CLOSED
        self.not_before = -inf
        self.failures_in_a_row = 0
        self._window.clear()
