"""Whether loading KV is faster than computing it, from what this engine has measured. Pure.

The engine's own speed is measured in steps that compute many tokens, and the speed of each tier in
loads. As long as either is unknown, the engine loads: that is how it learns the speed.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

MIN_STEP_TOKENS = 64
"""Steps with fewer tokens say more about a step's fixed cost than about computing prompts."""
MIN_SAMPLES = 3
MAX_STEPS = 32
MAX_LOADS = 7
"""The median changes after four loads: a tier that has stalled once is used again soon."""
MAX_TIMED_STEPS = 8
"""More steps than this are never in flight at once."""
RETRY_EVERY = 16
"""Every 16th load that would be slower than computing is tried: the tier may have become faster."""


@dataclass(slots=True)
class BreakEven:
    """Medians of the last measurements. `now` is in local monotonic seconds."""

    _token_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    _byte_s: dict[str, deque[float]] = field(default_factory=dict)
    _num_skipped: int = 0
    _num_steps: int = 0
    _timed_steps: dict[int, tuple[float, int]] = field(default_factory=dict)
    """When each step that computes many tokens was built, and how many tokens it computes."""
    _last_output: float = 0.0
    """When the engine last reported a step's end."""

    def begin_step(self, num_tokens: int, now: float) -> int | None:
        """Count a step that is built now. Its number if it is measured, else None."""
        self._num_steps += 1
        if num_tokens < MIN_STEP_TOKENS:
            return None
        self._timed_steps[self._num_steps] = (now, num_tokens)
        if len(self._timed_steps) > MAX_TIMED_STEPS:
            del self._timed_steps[next(iter(self._timed_steps))]
        return self._num_steps

    def end_step(self, step: int | None, now: float) -> None:
        """Note that a step has ended; `step` is its number if it was measured."""
        timed = None if step is None else self._timed_steps.pop(step, None)
        if timed is not None:
            built, num_tokens = timed
            # With async scheduling, the step before was still running when this one was built.
            seconds = now - max(built, self._last_output)
            if seconds > 0:
                self._token_s.append(seconds / num_tokens)
        self._last_output = now

    def note_load(self, seconds: float, bytes_by_tier: Mapping[str, int]) -> None:
        """Count a load for the tier that most of it came from."""
        if not bytes_by_tier or seconds <= 0:
            return
        tier = max(bytes_by_tier, key=lambda name: bytes_by_tier[name])
        samples = self._byte_s.setdefault(tier, deque(maxlen=MAX_LOADS))
        samples.append(seconds / sum(bytes_by_tier.values()))

    def is_load_faster(self, num_tokens: int, bytes_by_tier: Mapping[str, int]) -> bool:
        """Whether to load `num_tokens` tokens, of which each tier has so many bytes."""
        compute_s = self.compute_s(num_tokens)
        load_s = self.load_s(bytes_by_tier)
        if compute_s is None or load_s is None or load_s <= compute_s:
            return True
        self._num_skipped += 1
        return self._num_skipped % RETRY_EVERY == 0

    def compute_s(self, num_tokens: int) -> float | None:
        """How long computing takes; None if unknown."""
        if len(self._token_s) < MIN_SAMPLES:
            return None
        return num_tokens * _median(self._token_s)

    def load_s(self, bytes_by_tier: Mapping[str, int]) -> float | None:
        """How long a load takes; None if the speed of a tier is unknown."""
        total = 0.0
        for tier, size in bytes_by_tier.items():
            samples = self._byte_s.get(tier, ())
            if len(samples) < MIN_SAMPLES:
                return None
            total += size * _median(samples)
        return total


def _median(samples: Collection[float]) -> float:
    # A fraction of the time of `statistics.median`, which the engine's thread would spend.
    return sorted(samples)[len(samples) // 2]
