"""How a consumer fills blocks by reading: what there is to read, as far as it has come, and the question whether it was right. Pure."""

from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.events import PrefillCompleted, PullGivenUp
from kvferry.protocol.actions import StartRead, StopRead
from kvferry.protocol.consumer_parts import ConsumerParts
from kvferry.protocol.messages import Confirmed
from kvferry.protocol.pulls import Pull
from kvferry.protocol.read_plans import is_complete, plan_reads, tokens_to_read
from kvferry.protocol.transfers import TransferEvent, TransferState
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

    def be_patient(self, pull: Pull, now: float) -> None:
        """A producer that computes is waited for while there is more and more; when all is there, the usual deadline begins."""
        if not pull.has_blocks:
            return
        settings, arrival, peer = self.parts.settings, pull.arrival, self.parts.peers.get(pull.life)
        if not arrival.is_complete and peer is not None and is_complete(pull, peer):
            arrival.is_complete = True
            pull.to.give_up_at = now + settings.receive_timeout_s
            if pull.origin.invitation is not None:
                wanted = pull.to.tokens
                num_left = wanted.stop - max(wanted.start, arrival.landed_until)
                self.parts.events.append(PrefillCompleted(pull.request, len(wanted), num_left, arrival.landed_bytes))
        elif not arrival.is_complete:
            pull.to.give_up_at = arrival.grown_at + settings.offer_timeout_s
        if not pull.outstanding.reads and pull.state is not TransferState.CONFIRMING:
            self.parts.pulls.set_deadline(pull, pull.to.give_up_at)

    def ask_confirmation(self, pull: Pull, now: float) -> None:
        peer = self.parts.peers.get(pull.life)
        assert peer is not None
        self.parts.pulls.set_deadline(pull, min(pull.to.give_up_at, now + self.parts.settings.confirm_timeout_s))
        pull.outstanding.confirmations = set(peer.visits)
        self.parts.talk.ask_confirmation(pull, peer)

    def receive_confirmed(self, address: str, message: Confirmed, now: float) -> None:
        pull = self.parts.pulls.of_reader(message.reader)
        if pull is None or pull.state is not TransferState.CONFIRMING or pull.lease != message.lease:
            return
        rank = self.parts.peers.rank_at(pull.life, address, pull.outstanding.confirmations)
        if rank is None:
            return
        pull.outstanding.confirmations.discard(rank)
        if not pull.outstanding.confirmations:
            self.parts.meet(pull, TransferEvent.CONFIRMED, now, "")
