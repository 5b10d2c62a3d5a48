"""The lines in the log about tiers that fail."""

import logging
from collections import Counter
from dataclasses import dataclass, field
from math import inf

__all__ = ["TroubleLog"]

LOG_INTERVAL_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class TroubleLog:
    """Logs one reason a minute for each tier and operation: thousands of objects may fail at once,
    and every reason names another object. Owned by one thread.
    """

    _logged_at: dict[tuple[str, str], float] = field(default_factory=dict)
    _num_suppressed: Counter[tuple[str, str]] = field(default_factory=Counter)

    def note(self, operation: str, tier: str, reason: str, now: float) -> None:
        """Log why KV cannot be stored, loaded or looked up. `now` is in monotonic seconds."""
        kind = (operation, tier)
        if now - self._logged_at.get(kind, -inf) < LOG_INTERVAL_S:
            self._num_suppressed[kind] += 1
            return
        _log.warning(
            "KV cannot be %s tier=%s reason=%s suppressed=%d",
            operation,
            tier,
            reason,
            self._num_suppressed.pop(kind, 0),
        )
        self._logged_at[kind] = now
