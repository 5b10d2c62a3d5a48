"""`kv_transfer_params` as they come from outside: read once here, typed from then on. Pure.

Anything a client may have typed is possible; only a genuine ticket names a peer, so the other keys are not even looked at.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["BadParams", "NoTransfer", "PrefillForPeer", "PullFromPeer", "TransferRole", "read_params"]


@dataclass(frozen=True, slots=True)
class NoTransfer:
    """An ordinary request."""


@dataclass(frozen=True, slots=True)
class PrefillForPeer:
    """Its KV is to be handed over when it is done. `push_ticket` is whatever came under that key."""

    push_ticket: object = None


@dataclass(frozen=True, slots=True)
class PullFromPeer:
    """Its KV waits at a producer, or is about to be computed there. `ticket` and `push_ticket` are whatever came under these keys."""

    ticket: object
    push_ticket: object = None


@dataclass(frozen=True, slots=True)
class BadParams:
    reason: str


TransferRole = NoTransfer | PrefillForPeer | PullFromPeer | BadParams


def read_params(params: Mapping[str, Any] | None) -> TransferRole:
    if params is None:
        return NoTransfer()
    if not isinstance(params, Mapping):
        return BadParams("kv_transfer_params is not an object")
    flags = {}
    for name in ("do_remote_prefill", "do_remote_decode"):
        flag = params.get(name)
        if flag is not None and not isinstance(flag, bool):
            return BadParams(f"kv_transfer_params.{name} is {flag!r:.40}, not true or false")
        flags[name] = bool(flag)
    if flags["do_remote_prefill"] and flags["do_remote_decode"]:
        return BadParams("kv_transfer_params ask for do_remote_prefill and do_remote_decode at once")
    if flags["do_remote_prefill"]:
        return PullFromPeer(params.get("ticket"), params.get("push_ticket"))
    return PrefillForPeer(params.get("push_ticket")) if flags["do_remote_decode"] else NoTransfer()
