"""The lines in the log about tiers that fail."""

import logging

from kvferry.logs import repeats_of

_log = logging.getLogger(__name__)


def log_trouble(operation: str, tier: str, reason: str) -> None:
    """Log why KV cannot be stored, loaded or looked up.

    Thousands of objects may fail at once, and every reason names another object: the lines of one
    tier and operation are repeats.
    """
    _log.warning(
        "KV cannot be %s tier=%s reason=%s",
        operation,
        tier,
        reason,
        extra=repeats_of(operation, tier),
    )
