"""Pulls that a consumer can do without: it hears from the producer whether it can have them before it sets blocks aside. Pure.

A request that can be computed shall not fail because something that would only have saved time is gone. So the producer is asked first,
for a bounded time, and after that the answer is either a promise (the lease is held for us) or a refusal, and no blocks are involved.
"""

from dataclasses import dataclass

from kvferry.events import KeptBlocksFetched, PullPromised, PullRefused
from kvferry.protocol.consumer_parts import ConsumerParts
from kvferry.protocol.peers import Peer
from kvferry.protocol.pulls import Pull
from kvferry.protocol.transfers import TransferState

__all__ = ["Promises"]


@dataclass(frozen=True, slots=True)
class Promises:
    parts: ConsumerParts

    def await_answers(self, pull: Pull, peer: Peer, now: float) -> None:
        """Every rank of the producer has been asked; where it matters, each shall say that it is ready."""
        if not pull.origin.is_optional:
            return
        pull.outstanding.exposures = set(peer.visits)
        self.parts.pulls.set_deadline(pull, now + self.parts.settings.confirm_timeout_s)

    def note(self, pull: Pull, before: TransferState, now: float) -> None:
        """A pull has just come to another state, or to the same again."""
        if not pull.origin.is_optional:
            return
        pulls, events = self.parts.pulls, self.parts.events
        match pull.state:
            case TransferState.READY:
                # The producer may need those blocks itself, and we may be waiting for each other: not for ever.
                pulls.set_deadline(pull, now + self.parts.settings.confirm_timeout_s)
                events.append(PullPromised(pull.request))
            case TransferState.DOOMED if before is not TransferState.DOOMED:
                pulls.set_deadline(pull, None)
                events.append(PullRefused(pull.request, pull.reason))
            case TransferState.DONE:
                events.append(KeptBlocksFetched(pull.request, len(pull.to.tokens), pull.arrival.landed_bytes))
