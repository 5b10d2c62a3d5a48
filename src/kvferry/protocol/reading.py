"""How a consumer fills blocks by reading: what there is to read, as far as it has come. Pure."""

from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.events import PullGivenUp
from kvferry.protocol.actions import StartRead, StopRead
from kvferry.protocol.consumer_parts import ConsumerParts
from kvferry.protocol.pulls import Pull
from kvferry.protocol.read_plans import is_complete, plan_reads, tokens_to_read
from kvferry.protocol.transfers import TransferEvent
from kvferry.types import PeerId

__all__ = ["Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    parts: ConsumerParts

    def start(self, pull: Pull, now: float) -> None:
        """Read what there is to read. If there is nothing yet, the next offer brings us here again."""
        parts, settings = self.parts, self.parts.settings
        peer = parts.peers.get(pull.life)
        assert peer is not None
        tokens = tokens_to_read(parts.geometry, pull, peer)
        if not tokens and pull.origin.invitation is not None and not is_complete(pull, peer):
            parts.pulls.set_deadline(pull, pull.to.give_up_at)
            return
        parts.pulls.set_deadline(pull, min(pull.to.give_up_at, now + settings.read_timeout_s))
        try:
            plans = plan_reads(parts.geometry, pull, peer, tokens)
        except RemoteProtocolError as error:
            parts.meet(pull, TransferEvent.MOVE_FAILED, now, str(error))
            return
        pull.arrival.post(tokens.stop, sum(part.total_bytes for pieces in plans.values() for part in pieces))
        pull.outstanding.reads = set(plans)
        parts.talk.announce_read(pull, peer, list(plans), now)
        for rank, pieces in plans.items():
            parts.actions.append(StartRead(pull.request, peer.peer_id(rank), peer.planes[rank], tuple(pieces)))

    def stop(self, pull: Pull) -> None:
        for rank in pull.outstanding.reads:
            self.parts.actions.append(StopRead(pull.request, PeerId(pull.life.engine, pull.life.epoch, rank)))

    def give_up(self, pull: Pull, now: float) -> None:
        # No deadline while stopping: a plane yields every handle it was given, and handing blocks back earlier could let bytes land in
        # somebody else's.
        self.parts.pulls.set_deadline(pull, None)
        is_placing = not pull.outstanding.reads and pull.is_confirmed
        if not pull.outstanding.reads and not is_placing:
            self.parts.meet(pull, TransferEvent.MOVE_FAILED, now, pull.reason)
            return
        self.parts.events.append(PullGivenUp(pull.request, pull.reason))
        self.stop(pull)
