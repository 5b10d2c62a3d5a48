"""When to stop asking a storage that fails, and when to try it again. Pure.

The caller passes `now` (local monotonic seconds), and holds a lock if several threads call.
"""

from dataclasses import dataclass, field

__all__ = ["FailureBackoff"]


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
