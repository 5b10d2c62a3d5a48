"""When to stop asking a storage that fails, and when to try it again."""

import logging
import threading
from collections.abc import Callable

from kvferry.logs import repeats_of

FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class StorageFailed(Exception):
    """The storage did not answer, or answered with an error. The text is a sentence for the log."""


class StorageNotAsked(StorageFailed):
    """The storage failed some seconds ago, and is not asked yet."""


class StorageHealth:
    """The back-off of one storage, or of one kind of request to it. Any thread may call.

    After more than `tolerated` failures in a row, nothing is allowed for `FIRST_PAUSE_S`, then one
    attempt. If it fails, the pause doubles, up to `MAX_PAUSE_S`; the first success ends all pauses.
    """

    def __init__(self, clock: Callable[[], float], tolerated: int = 0) -> None:
        self._clock = clock
        self._tolerated = tolerated
        self._lock = threading.Lock()
        self._last_reason = ""
        self._num_failures = 0
        self._pause_s = 0.0
        self._allowed_at = 0.0
        self._is_probing = False

    def check(self) -> None:
        """Raises `StorageNotAsked` if the storage must not be asked now. A caller that may ask
        reports `failed` or `succeeded` afterwards. After a pause one caller may ask; the others
        wait until that caller has reported, at most for another pause.
        """
        with self._lock:
            if self._pause_s == 0:
                return
            now = self._clock()
            if now < self._allowed_at:
                raise StorageNotAsked(f"waiting after a failure: {self._last_reason}")
            self._allowed_at = now + self._pause_s
            self._is_probing = True

    def failed(self, reason: str) -> None:
        with self._lock:
            self._num_failures += 1
            self._last_reason = reason
            # Attempts that had begun before the pause, and fail during it, do not prolong it.
            if self._num_failures > self._tolerated and (self._pause_s == 0 or self._is_probing):
                self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
                self._allowed_at = self._clock() + self._pause_s
                self._is_probing = False

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures, self._pause_s, self._is_probing = 0, 0.0, False


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
