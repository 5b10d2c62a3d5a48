"""Typed reading of `kv_transfer_params`. Pure.

The parameters come from a client or router and may hold anything; `read_params` checks them once
and returns a typed role. A valid ticket names a peer. Without a ticket, the keys by which vLLM's
routers name the prefill side are used only if the named engine is one of the configured `peers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.config.side_channel import numeric_host
from kvferry.protocol.producer.leases import MAX_TURN_ID_CHARS
from kvferry.protocol.tickets import MAX_TICKET_NAME_CHARS, MAX_TP_SIZE
from kvferry.types import Address

MAX_LEG_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class NoTransfer:
    """A request that is neither a prefill leg nor a decode leg."""

    turn_id: str | None = None
    """The id under which a router asks for the blocks in the next turn of the conversation; empty
    if the router takes the ticket from the answer. None: the blocks are not retained.
    """


@dataclass(frozen=True, slots=True)
class PrefillForPeer:
    """A prefill leg, whose KV a peer will fetch. `push_ticket` and `ticket` are unchecked."""

    push_ticket: object = None
    ticket: object = None
    """The ticket of a turn that a decode side has retained of this conversation."""


@dataclass(frozen=True, slots=True)
class UnsignedPeer:
    """A prefill side as named by a router that signs nothing."""

    engine: str
    address: Address
    """The address of the prefill side's side channel."""
    tp_size: int


@dataclass(frozen=True, slots=True)
class LoadFromPeer:
    """A decode leg, whose KV is at a producer or will be computed there. `ticket` and `push_ticket`
    are unchecked values.
    """

    ticket: object
    push_ticket: object = None
    unsigned_peer: UnsignedPeer | None = None
    """The prefill side that the unsigned keys name; None if the keys are missing or malformed."""
    turn_id: str | None = ""
    """As `NoTransfer.turn_id`."""


@dataclass(frozen=True, slots=True)
class BadParams:
    """Parameters that cannot be used, with the reason."""

    reason: str


TransferRole = NoTransfer | PrefillForPeer | LoadFromPeer | BadParams


def read_params(params: Mapping[str, Any] | None) -> TransferRole:
    """The role that the parameters give a request; malformed parameters give `BadParams`, never an
    exception.
    """
    if params is None:
        return NoTransfer()
    if not isinstance(params, Mapping):
        return BadParams(f"kv_transfer_params must be an object, not {type(params).__name__}")
    flags = {}
    for name in ("do_remote_prefill", "do_remote_decode"):
        flag = params.get(name)
        if flag is not None and not isinstance(flag, bool):
            return BadParams(f"kv_transfer_params.{name} must be true or false, not {flag!r:.40}")
        flags[name] = bool(flag)
    if flags["do_remote_prefill"] and flags["do_remote_decode"]:
        return BadParams(
            "kv_transfer_params set both do_remote_prefill and do_remote_decode; set one of them"
        )
    if flags["do_remote_prefill"]:
        return LoadFromPeer(
            params.get("ticket"),
            params.get("push_ticket"),
            _unsigned_peer(params),
            _turn_id(params, ""),
        )
    if flags["do_remote_decode"]:
        return PrefillForPeer(params.get("push_ticket"), params.get("ticket"))
    return NoTransfer(_turn_id(params, None))


def first_token_params(max_model_len: int) -> dict[str, Any]:
    """The parameters by which P tells a router that the token it sampled is the first token of the
    answer, and that a completion may continue after it. Without them, P's token means nothing.
    """
    return {"first_token": {"max_model_len": max_model_len}}


def read_leg_id(params: object) -> str:
    """The id under which the router that sent this leg may release the leg, or ask why its transfer
    failed; empty if the router sent none.
    """
    leg_id = params.get("leg_id") if isinstance(params, Mapping) else None
    return leg_id if isinstance(leg_id, str) and len(leg_id) <= MAX_LEG_ID_CHARS else ""


def _turn_id(params: Mapping[str, Any], default: str | None) -> str | None:
    turn_id = params.get("conversation", default)
    if turn_id is None:
        return None
    return turn_id if isinstance(turn_id, str) and len(turn_id) <= MAX_TURN_ID_CHARS else ""


def _unsigned_peer(params: Mapping[str, Any]) -> UnsignedPeer | None:
    engine, host = _name(params.get("remote_engine_id")), _name(params.get("remote_host"))
    port, tp_size = (
        _count(params.get("remote_port"), 65535),
        _count(params.get("tp_size", 1), MAX_TP_SIZE),
    )
    return (
        UnsignedPeer(engine, Address(numeric_host(host), port), tp_size)
        if engine and host and port and tp_size
        else None
    )


def _name(value: object) -> str:
    """The value as a name; empty if the value is not a name."""
    return value if isinstance(value, str) and len(value) <= MAX_TICKET_NAME_CHARS else ""


def _count(value: object, maximum: int) -> int:
    """The value as a positive count; 0 if the value is not a count up to `maximum`."""
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= maximum
        else 0
    )
