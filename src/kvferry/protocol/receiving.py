"""How a consumer fills blocks by reading: what there is to read, as far as it has come, and the
question whether it was right. Pure.
"""

from dataclasses import dataclass, field

from kvferry.errors import RemoteProtocolError
from kvferry.events import (
    PrefillCompleted,
    ReservationGranted,
    ReservationRefused,
    RetainedBlocksFetched,
    TransferAbandoned,
)
from kvferry.protocol.actions import GrantWrites, RevokeWrites, Send, StartRead, StopRead
from kvferry.protocol.consumer_context import ConsumerContext
from kvferry.protocol.messages import (
    MAX_NAME_CHARS,
    Confirmed,
    Revoke,
    Revoked,
    WriteFailed,
    WriteGrantInfo,
    Written,
)
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import plan_permutations
from kvferry.protocol.transfer import (
    Transfer,
    TransferEvent,
    TransferState,
    WriteGrant,
    is_complete,
    plan_reads,
    tokens_to_read,
)
from kvferry.types import PeerId

__all__ = ["MAX_GRANTED_BLOCKS", "REVOKING", "Reading", "Reservations", "WriteGrants"]


@dataclass(frozen=True, slots=True)
class Reading:
    context: ConsumerContext

    def start(self, transfer: Transfer, now: float) -> None:
        """Read what there is to read. If there is nothing yet, the next offer brings us here
        again.
        """
        context, settings = self.context, self.context.settings
        peer = context.peers.get(transfer.incarnation)
        assert peer is not None
        tokens = tokens_to_read(context.geometry, transfer, peer)
        if not tokens and transfer.origin.push_info is not None and not is_complete(transfer, peer):
            context.transfers.set_deadline(transfer, transfer.to.give_up_at)
            return
        context.transfers.set_deadline(
            transfer, min(transfer.to.give_up_at, now + settings.read_timeout_s)
        )
        try:
            plans = plan_reads(context.geometry, transfer, peer, tokens)
        except RemoteProtocolError as error:
            context.handle_event(transfer, TransferEvent.MOVE_FAILED, now, str(error))
            return
        transfer.arrival.post(
            tokens.stop, sum(part.total_bytes for segments in plans.values() for part in segments)
        )
        transfer.outstanding.reads = set(plans)
        context.client.announce_read(transfer, peer, list(plans), now)
        for rank, segments in plans.items():
            context.actions.append(
                StartRead(
                    transfer.request, peer.peer_id(rank), peer.transports[rank], tuple(segments)
                )
            )

    def stop(self, transfer: Transfer) -> None:
        for rank in transfer.outstanding.reads:
            self.context.actions.append(
                StopRead(
                    transfer.request,
                    PeerId(transfer.incarnation.engine, transfer.incarnation.epoch, rank),
                )
            )

    def give_up(self, transfer: Transfer, now: float) -> None:
        # No deadline while stopping: a transport yields every handle it was given, and handing
        # blocks back earlier could let bytes land in somebody else's.
        self.context.transfers.set_deadline(transfer, None)
        is_placing = not transfer.outstanding.reads and transfer.is_confirmed
        if not transfer.outstanding.reads and not is_placing:
            self.context.handle_event(transfer, TransferEvent.MOVE_FAILED, now, transfer.reason)
            return
        self.context.events.append(TransferAbandoned(transfer.request, transfer.reason))
        self.stop(transfer)

    def extend_deadline(self, transfer: Transfer, now: float) -> None:
        """A producer that computes is waited for while there is more and more; when all is there,
        the usual deadline begins.
        """
        if not transfer.has_blocks:
            return
        settings, arrival, peer = (
            self.context.settings,
            transfer.arrival,
            self.context.peers.get(transfer.incarnation),
        )
        if not arrival.is_complete and peer is not None and is_complete(transfer, peer):
            arrival.is_complete = True
            transfer.to.give_up_at = now + settings.receive_timeout_s
            if transfer.origin.push_info is not None:
                wanted = transfer.to.tokens
                num_left = wanted.stop - max(wanted.start, arrival.landed_until)
                self.context.events.append(
                    PrefillCompleted(transfer.request, len(wanted), num_left, arrival.landed_bytes)
                )
        elif not arrival.is_complete:
            transfer.to.give_up_at = arrival.progressed_at + settings.offer_timeout_s
        if not transfer.outstanding.reads and transfer.state is not TransferState.CONFIRMING:
            self.context.transfers.set_deadline(transfer, transfer.to.give_up_at)

    def ask_confirmation(self, transfer: Transfer, now: float) -> None:
        peer = self.context.peers.get(transfer.incarnation)
        assert peer is not None
        self.context.transfers.set_deadline(
            transfer, min(transfer.to.give_up_at, now + self.context.settings.confirm_timeout_s)
        )
        transfer.outstanding.confirmations = set(peer.rank_mappings)
        self.context.client.ask_confirmation(transfer, peer)

    def receive_confirmed(self, address: str, message: Confirmed, now: float) -> None:
        transfer = self.context.transfers.of_reader(message.reader)
        if (
            transfer is None
            or transfer.state is not TransferState.CONFIRMING
            or transfer.lease != message.lease
        ):
            return
        rank = self.context.peers.rank_at(
            transfer.incarnation, address, transfer.outstanding.confirmations
        )
        if rank is None:
            return
        transfer.outstanding.confirmations.discard(rank)
        if not transfer.outstanding.confirmations:
            self.context.handle_event(transfer, TransferEvent.CONFIRMED, now, "")


# -------------------- promises -------------------- Pulls that a consumer can do without: it hears
# from the producer whether it can have them before it sets blocks aside. Pure.
#
# A request that can be computed shall not fail because something that would only have saved time is
# gone. So the producer is asked first, for a bounded time, and after that the answer is either a
# promise (the lease is held for us) or a refusal, and no blocks are involved.


@dataclass(frozen=True, slots=True)
class Reservations:
    context: ConsumerContext

    def await_answers(self, transfer: Transfer, peer: Peer, now: float) -> None:
        """Every rank of the producer has been asked; where it matters, each shall say that it is
        ready.
        """
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
                # The producer may need those blocks itself, and we may be waiting for each other:
                # not for ever.
                transfers.set_deadline(transfer, now + self.context.settings.confirm_timeout_s)
                events.append(ReservationGranted(transfer.request))
            case TransferState.DOOMED if before is not TransferState.DOOMED:
                transfers.set_deadline(transfer, None)
                events.append(ReservationRefused(transfer.request, transfer.reason))
            case TransferState.DONE:
                events.append(
                    RetainedBlocksFetched(
                        transfer.request, len(transfer.to.tokens), transfer.arrival.landed_bytes
                    )
                )


# -------------------- lending -------------------- How a consumer has its blocks filled by a
# producer that writes: which it has lent, and how it gets them back. Pure.
#
# Blocks are lent where all ranks of the producer that a request goes to are reached by one
# transport that we may lend by. A transport with a fence lets in what is written under the lease's
# number and nothing else, and ends that for certain when it is told to. Without a fence only the
# producer itself can say that it writes no more: it is asked (`Revoke`), again and again, until it
# answers, or another incarnation of it does. One that stays silent has stopped by itself when its
# lease was not renewed; it is given ten leases, for whatever may have held it up.


MAX_GRANTED_BLOCKS = 400_000
"""Of a lease: more do not fit into a message."""
REVOKE_RETRY_S = 1.0
GRACE_LEASES = 10
REVOKING = (TransferState.RECLAIMING, TransferState.RETURNING, TransferState.STOPPING)
_E = TransferEvent


@dataclass(slots=True)
class WriteGrants:
    context: ConsumerContext
    _last_grant_id: int = field(default=0, init=False)

    def can_grant(self, transfer: Transfer, peer: Peer) -> bool:
        """Whether the producer may write what this request wants."""
        used = {peer.transports[rank] for rank in peer.rank_mappings}
        return (
            transfer.origin.push_info is not None
            and transfer.has_blocks
            and not transfer.is_offered
            and not transfer.to.was_granted
            and sum(map(len, transfer.to.blocks)) <= MAX_GRANTED_BLOCKS
            and len(transfer.request) <= MAX_NAME_CHARS
            and len(used) == 1
            and used <= self.context.settings.writable_transports
            and not any(peer.layouts[rank].uses_host_buffer for rank in peer.rank_mappings)
        )

    def grant_writes(self, transfer: Transfer, peer: Peer, now: float) -> None:
        """Register anew, with the blocks."""
        geometry, to = self.context.geometry, transfer.to
        try:
            permutations = plan_permutations(
                geometry,
                [peer.geometries[rank] for rank in peer.rank_mappings],
                to.blocks,
                to.tokens,
            )
        except RemoteProtocolError as error:
            self.context.handle_event(transfer, _E.REFUSED, now, str(error))
            return
        to.permutations = tuple(permutations)
        [transport] = {peer.transports[rank] for rank in peer.rank_mappings}
        self._last_grant_id += 1
        transfer.to.write_grant = WriteGrant(
            self._last_grant_id,
            transport,
            transport in self.context.settings.fenced,
            set(peer.rank_mappings),
        )
        transfer.to.was_granted = True
        if transfer.to.write_grant.is_fenced:
            self.context.actions.append(
                GrantWrites(
                    transport,
                    transfer.to.write_grant.grant_id,
                    to.filled_blocks(geometry.block_size),
                )
            )
        self.context.client.register(
            transfer, peer, geometry.tp_size, now, self._lease(transfer, transfer.to.write_grant)
        )
        self.context.handle_event(transfer, _E.WRITES_GRANTED, now, "")

    def _lease(self, transfer: Transfer, write_grant: WriteGrant) -> WriteGrantInfo:
        push_info, to = transfer.origin.push_info, transfer.to
        assert push_info is not None
        return WriteGrantInfo(
            grant_id=write_grant.grant_id,
            transport=write_grant.transport,
            tp_rank=self.context.geometry.tp_rank,
            local_block_ids=[list(group) for group in to.blocks],
            first_token=to.tokens.start,
            end_token=to.tokens.stop,
            needed_from=list(to.needed_from),
            tokens=push_info.tokens,
        )

    def receive(self, address: str, message: Written | WriteFailed | Revoked, now: float) -> None:
        transfer = self.context.transfers.of_reader(message.reader)
        if (
            transfer is None
            or transfer.to.write_grant is None
            or transfer.to.write_grant.grant_id != message.grant_id
        ):
            return
        write_grant = transfer.to.write_grant
        rank = self.context.peers.rank_at(transfer.incarnation, address, write_grant.writers)
        if rank is None:
            return
        is_filling = transfer.state is TransferState.FILLING
        match message:
            case Written(is_last=False):
                if is_filling and transfer.arrival.note(rank, message.tokens, now):
                    transfer.to.give_up_at = now + self.context.settings.offer_timeout_s
                    self.context.transfers.set_deadline(transfer, transfer.to.give_up_at)
            case WriteFailed() | Revoked() if is_filling:
                # What was written may still be landing, so this is no proof that it has stopped.
                # One that gives back what nobody has asked for has not written it.
                self.context.handle_event(transfer, _E.MOVE_FAILED, now, "")
            case Written():
                write_grant.writers.discard(rank)
                write_grant.note_end(message.left_tokens, message.early_bytes)
                self._note_writer_done(transfer, write_grant, is_filling, now)
            case Revoked():
                write_grant.writers.discard(rank)
                self._note_writer_done(transfer, write_grant, is_filled=False, now=now)

    def _note_writer_done(
        self, transfer: Transfer, write_grant: WriteGrant, is_filled: bool, now: float
    ) -> None:
        """One rank will write no more: it has written all, or was asked to stop."""
        if write_grant.writers:
            return
        if is_filled:
            self.context.events.append(
                PrefillCompleted(
                    transfer.request,
                    len(transfer.to.tokens),
                    write_grant.left_tokens,
                    write_grant.early_bytes,
                )
            )
            self.context.handle_event(transfer, _E.BYTES_MOVED, now, "")
        elif not write_grant.is_fenced:
            self.finish_revoke(transfer, now)

    def begin_revoke(self, transfer: Transfer, before: TransferState, now: float) -> None:
        """The blocks are used, or handed back, only when the producer can certainly write no
        more.
        """
        if transfer.state is before:
            return
        if transfer.state is TransferState.STOPPING:
            self.context.events.append(TransferAbandoned(transfer.request, transfer.reason))
        if before is TransferState.FILLING:
            self.revoke(transfer, now)

    def revoke(self, transfer: Transfer, now: float) -> None:
        """Have the producer write no more. Where there is a fence, its transport says when that is
        certain.
        """
        write_grant, peer = transfer.to.write_grant, self.context.peers.get(transfer.incarnation)
        assert write_grant is not None
        if write_grant.revoke_deadline is None:
            write_grant.revoke_deadline = (
                now + (1 + GRACE_LEASES) * self.context.settings.registration_s
            )
        if peer is not None and peer.is_ready:
            message = Revoke(transfer.incarnation.epoch, transfer.reader, write_grant.grant_id)
            self.context.actions.extend(
                Send(peer.control_address(rank), message) for rank in write_grant.writers
            )
        if write_grant.is_fenced:
            self.context.transfers.set_deadline(transfer, None)
            self.context.actions.append(
                RevokeWrites(transfer.request, write_grant.transport, write_grant.grant_id)
            )
        elif not write_grant.writers or write_grant.revoke_deadline <= now:
            self.finish_revoke(transfer, now)
        else:
            self.context.transfers.set_deadline(transfer, now + REVOKE_RETRY_S)
            self.context.peers.ensure(
                transfer.incarnation, transfer.origin.address, transfer.origin.tp_size, now
            )

    def finish_revoke(self, transfer: Transfer, now: float) -> None:
        """Nothing that was written under this loan lands any more."""
        if transfer.state not in REVOKING:
            return
        transfer.to.write_grant = None
        match transfer.state:
            case TransferState.RECLAIMING:
                self.context.handle_event(transfer, _E.CONFIRMED, now, "")
            case TransferState.RETURNING:
                self.context.handle_event(transfer, _E.BYTES_MOVED, now, "")
            case _:
                self.context.handle_event(transfer, _E.MOVE_FAILED, now, transfer.reason)
