"""What a connector offers an engine for a request that waits. Plain data."""

from dataclasses import dataclass

from kvferry.connectors.shared_tickets import SharedTicketKey

__all__ = ["LoadOffer"]


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """What a waiting request may load: the first `num_tokens` tokens of its prompt, or nothing, for this reason."""

    num_tokens: int
    ticket: SharedTicketKey | None = None
    refusal: str | None = None
    min_tokens: int = 1
    """With fewer than so many tokens to load, nothing is loaded."""
    is_optional: bool = False
    """It only saves computing: whatever goes wrong, the request is computed."""
    unchecked_ticket: str = ""
    """The ticket with which the producer is asked whether it can be had, once it is the request's turn."""
    num_pending_ranks: int = 0
    """So many ranks have yet to hear from it."""
