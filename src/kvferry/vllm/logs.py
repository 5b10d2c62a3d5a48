"""kvferry's log lines go where vLLM's go, in its format and from its level on."""

import logging

__all__ = ["log_with_vllm"]


def log_with_vllm() -> None:
    """Idempotent. Does nothing where the operator has configured a logger named kvferry."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("kvferry")
    if ours.handlers or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False
