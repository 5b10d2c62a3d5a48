"""How a consumer fills blocks by reading: what there is to read, as far as it has come, and the question whether it was right. Pure."""

from dataclasses import dataclass

from kvferry.errors import RemoteProtocolError
from kvferry.events import PrefillCompleted, TransferAbandoned
from kvferry.protocol.actions import StartRead, StopRead
from kvferry.protocol.consumer_parts import ConsumerContext
from kvferry.protocol.messages import Confirmed
from kvferry.protocol.pulls import Transfer
from kvferry.protocol.read_plans import is_complete, plan_reads, tokens_to_read
from kvferry.protocol.transfers import TransferEvent, TransferState
from kvferry.types import PeerId

__all__ = ["Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    context: ConsumerContext

    def start(self, transfer: Transfer, now: float) -> None:
        """Read what there is to read. If there is nothing yet, the next offer brings us here again."""
        context, settings = self.context, self.context.settings
        peer = context.peers.get(transfer.incarnation)
        assert peer is not None
        tokens = tokens_to_read(context.geometry, transfer, peer)
        if not tokens and transfer.origin.push_info is not None and not is_complete(transfer, peer):
            context.transfers.set_deadline(transfer, transfer.to.give_up_at)
            return
        context.transfers.set_deadline(transfer, min(transfer.to.give_up_at, now + settings.read_timeout_s))
        try:
            plans = plan_reads(context.geometry, transfer, peer, tokens)
        except RemoteProtocolError as error:
            context.handle_event(transfer, TransferEvent.MOVE_FAILED, now, str(error))
            return
        transfer.arrival.post(tokens.stop, sum(part.total_bytes for segments in plans.values() for part in segments))
        transfer.outstanding.reads = set(plans)
        context.client.announce_read(transfer, peer, list(plans), now)
        for rank, segments in plans.items():
            context.actions.append(StartRead(transfer.request, peer.peer_id(rank), peer.transports[rank], tuple(segments)))

    def stop(self, transfer: Transfer) -> None:
        for rank in transfer.outstanding.reads:
            self.context.actions.append(StopRead(transfer.request, PeerId(transfer.incarnation.engine, transfer.incarnation.epoch, rank)))

    def give_up(self, transfer: Transfer, now: float) -> None:
        # No deadline while stopping: a transport yields every handle it was given, and handing blocks back earlier could let bytes land in
        # somebody else's.
        self.context.transfers.set_deadline(transfer, None)
        is_placing = not transfer.outstanding.reads and transfer.is_confirmed
        if not transfer.outstanding.reads and not is_placing:
            self.context.handle_event(transfer, TransferEvent.MOVE_FAILED, now, transfer.reason)
            return
        self.context.events.append(TransferAbandoned(transfer.request, transfer.reason))
        self.stop(transfer)

    def extend_deadline(self, transfer: Transfer, now: float) -> None:
        """A producer that computes is waited for while there is more and more; when all is there, the usual deadline begins."""
        if not transfer.has_blocks:
            return
        settings, arrival, peer = self.context.settings, transfer.arrival, self.context.peers.get(transfer.incarnation)
        if not arrival.is_complete and peer is not None and is_complete(transfer, peer):
            arrival.is_complete = True
            transfer.to.give_up_at = now + settings.receive_timeout_s
            if transfer.origin.push_info is not None:
                wanted = transfer.to.tokens
                num_left = wanted.stop - max(wanted.start, arrival.landed_until)
                self.context.events.append(PrefillCompleted(transfer.request, len(wanted), num_left, arrival.landed_bytes))
        elif not arrival.is_complete:
            transfer.to.give_up_at = arrival.progressed_at + settings.offer_timeout_s
        if not transfer.outstanding.reads and transfer.state is not TransferState.CONFIRMING:
            self.context.transfers.set_deadline(transfer, transfer.to.give_up_at)

    def ask_confirmation(self, transfer: Transfer, now: float) -> None:
        peer = self.context.peers.get(transfer.incarnation)
        assert peer is not None
        self.context.transfers.set_deadline(transfer, min(transfer.to.give_up_at, now + self.context.settings.confirm_timeout_s))
        transfer.outstanding.confirmations = set(peer.rank_mappings)
        self.context.client.ask_confirmation(transfer, peer)

    def receive_confirmed(self, address: str, message: Confirmed, now: float) -> None:
        transfer = self.context.transfers.of_reader(message.reader)
        if transfer is None or transfer.state is not TransferState.CONFIRMING or transfer.lease != message.lease:
            return
        rank = self.context.peers.rank_at(transfer.incarnation, address, transfer.outstanding.confirmations)
        if rank is None:
            return
        transfer.outstanding.confirmations.discard(rank)
        if not transfer.outstanding.confirmations:
            self.context.handle_event(transfer, TransferEvent.CONFIRMED, now, "")
