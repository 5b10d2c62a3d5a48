"""Pulls that a consumer can do without: it hears from the producer whether it can have them before it sets blocks aside. Pure.

A request that can be computed shall not fail because something that would only have saved time is gone. So the producer is asked first,
for a bounded time, and after that the answer is either a promise (the lease is held for us) or a refusal, and no blocks are involved.
"""

from dataclasses import dataclass

from kvferry.events import ReservationGranted, ReservationRefused, RetainedBlocksFetched
from kvferry.protocol.consumer_parts import ConsumerContext
from kvferry.protocol.peers import Peer
from kvferry.protocol.pulls import Transfer
from kvferry.protocol.transfers import TransferState

__all__ = ["Reservations"]


@dataclass(frozen=True, slots=True)
class Reservations:
    context: ConsumerContext

    def await_answers(self, transfer: Transfer, peer: Peer, now: float) -> None:
        """Every rank of the producer has been asked; where it matters, each shall say that it is ready."""
        if not transfer.origin.is_optional:
            return
        transfer.outstanding.ready_replies = set(peer.rank_mappings)
        self.context.transfers.set_deadline(transfer, now + self.context.settings.confirm_timeout_s)

    def note(self, transfer: Transfer, before: TransferState, now: float) -> None:
        """A pull has just come to another state, or to the same again."""
        if not transfer.origin.is_optional:
            return
        transfers, events = self.context.transfers, self.context.events
        match transfer.state:
            case TransferState.READY:
                # The producer may need those blocks itself, and we may be waiting for each other: not for ever.
                transfers.set_deadline(transfer, now + self.context.settings.confirm_timeout_s)
                events.append(ReservationGranted(transfer.request))
            case TransferState.DOOMED if before is not TransferState.DOOMED:
                transfers.set_deadline(transfer, None)
                events.append(ReservationRefused(transfer.request, transfer.reason))
            case TransferState.DONE:
                events.append(RetainedBlocksFetched(transfer.request, len(transfer.to.tokens), transfer.arrival.landed_bytes))
