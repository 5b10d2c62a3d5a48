"""A clock that tests turn by hand."""

__all__ = ["ManualClock"]


class ManualClock:
    """Call it for the time; `advance` is the only way it goes on. It never goes back."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds:g} s)")
        self._now += seconds
