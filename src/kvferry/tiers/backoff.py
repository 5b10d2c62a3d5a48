"""When to stop asking a storage that fails, and when to try it again.

`FailureBackoff` is pure: the caller passes `now` (local monotonic seconds). `StorageHealth` is for
tiers, which many threads call.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.logs import repeats_of

FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class FailureBackoff:
    """After more than `tolerated` failures in a row, nothing is allowed for `first_s`, then one
    attempt. If it fails, the pause doubles, up to `max_s`; the first success ends all pauses.
    """

    first_s: float
    max_s: float
    tolerated: int = 0
    last_reason: str = field(default="", init=False)
    _num_failures: int = field(default=0, init=False)
    _pause_s: float = field(default=0.0, init=False)
    _allowed_at: float = field(default=0.0, init=False)
    _is_probing: bool = field(default=False, init=False)

    def allows(self, now: float) -> bool:
        """Whether the storage may be asked. After a pause one caller is allowed; the others wait
        until that caller has reported, at most for another pause.
        """
        if self._pause_s == 0:
            return True
        if now < self._allowed_at:
            return False
        self._allowed_at = now + self._pause_s
        self._is_probing = True
        return True

    def failed(self, now: float, reason: str) -> None:
        self._num_failures += 1
        self.last_reason = reason
        # Attempts that had begun before the pause, and fail during it, do not prolong it.
        if self._num_failures > self.tolerated and (self._pause_s == 0 or self._is_probing):
            self._pause_s = min(self.max_s, 2 * self._pause_s or self.first_s)
            self._allowed_at = now + self._pause_s
            self._is_probing = False

    def succeeded(self) -> None:
        self._num_failures, self._pause_s, self._is_probing = 0, 0.0, False


class StorageFailed(Exception):
    """The storage did not answer, or answered with an error. The text is a sentence for the log."""


class StorageNotAsked(StorageFailed):
    """The storage failed some seconds ago, and is not asked yet."""


class StorageHealth:
    """The back-off of one storage, or of one kind of request to it. Any thread may call."""

    def __init__(self, clock: Callable[[], float], tolerated: int = 0) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._backoff = FailureBackoff(FIRST_PAUSE_S, MAX_PAUSE_S, tolerated)

    def pause_reason(self) -> str | None:
        """The last failure if the storage must not be asked now; None if it may. A caller that may
        ask reports `failed` or `succeeded` afterwards.
        """
        with self._lock:
            is_allowed = self._backoff.allows(self._clock())
            return None if is_allowed else self._backoff.last_reason

    def check(self) -> None:
        """Raises `StorageNotAsked` if the storage must not be asked now."""
        reason = self.pause_reason()
        if reason is not None:
            raise StorageNotAsked(f"waiting after a failure: {reason}")

    def failed(self, reason: str) -> None:
        with self._lock:
            self._backoff.failed(self._clock(), reason)

    def succeeded(self) -> None:
        with self._lock:
            self._backoff.succeeded()


def log_trouble(operation: str, tier: str, reason: str) -> None:
    """Log why KV cannot be stored, loaded or looked up.

    Thousands of entries may fail at once, and every reason names another entry: the lines of one
    tier and operation are repeats.
    """
    _log.warning(
        "KV cannot be %s tier=%s reason=%s",
        operation,
        tier,
        reason,
        extra=repeats_of(operation, tier),
    )
