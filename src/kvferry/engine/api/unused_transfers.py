"""Requests that ask an engine without a connector for a KV transfer: they are computed plainly, and the log says so now and then. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["IgnoredTransfers"]

_ASKING = ("do_remote_prefill", "do_remote_decode")


@dataclass(slots=True)
class IgnoredTransfers:
    """Makes at most one note per interval, however many requests there are."""

    interval_s: float = 60.0
    _next_at: float = field(default=float("-inf"), init=False)

    def note(self, params: Mapping[str, Any] | None, now: float) -> str | None:
        """A sentence for the log, when one is due."""
        asked = [name for name in _ASKING if params and params.get(name) is True]
        if not asked or now < self._next_at:
            return None
        self._next_at = now + self.interval_s
        return f"{asked[0]} is ignored: this engine was started without --kv-transfer-config, so the prompt is computed here"
