"""Finding stop strings in text that arrives in segments.

Text that might be the beginning of a stop string is held back until it cannot be one any more, so nothing that has been
emitted is ever part of a stop string. What comes out does not depend on how the text was cut into segments. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["StopMatcher", "StopScan"]


@dataclass(frozen=True, slots=True)
class StopScan:
    """What one segment of text led to: text that may be shown, and the stop string that was completed, if any."""

    text: str
    stop: str | None = None


@dataclass(slots=True)
class StopMatcher:
    """Looks for the stop string that is completed first; of two completed by the same character, the longer."""

    stops: Sequence[str]
    _held: str = field(default="", init=False)

    def push(self, chunk: str) -> StopScan:
        """Take the next segment. After a hit the matcher is spent: `text` ends where the stop string begins."""
        if not self.stops:
            return StopScan(chunk)
        text = self._held + chunk
        hit = self._first_hit(text)
        if hit is not None:
            start, stop = hit
            self._held = ""
            return StopScan(text[:start], stop)
        keep = self._longest_beginning(text)
        cut = len(text) - keep
        self._held = text[cut:]
        return StopScan(text[:cut])

    def finish(self) -> str:
        """No more text follows: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_hit(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self.stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        longest = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
