"""How a consumer fills its blocks: by reading, after a reservation, or by granting writes.

`Reading` reads from the producer and asks for confirmation. `Reservations` handles transfers that
the engine can do without. `WriteGrants` lets the producer write and revokes the permission.
Pure: all three are parts of `Consumer` and share its `ConsumerContext`.
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
    """Reads KV from the producer, in steps while the prefill computes, and asks to confirm it."""

    context: ConsumerContext

    def start(self, transfer: Transfer, now: float) -> None:
        """Start a read of every token that is ready and not read yet.

        If no token is ready, wait: the next offer calls `start` again.
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
        """Cancel the reads in flight; the transport still reports the end of each read."""
        for rank in transfer.outstanding.reads:
            self.context.actions.append(
                StopRead(
                    transfer.request,
                    PeerId(transfer.incarnation.engine, transfer.incarnation.epoch, rank),
                )
            )

    def give_up(self, transfer: Transfer, now: float) -> None:
        # STOPPING has no deadline: a transport reports the end of every read. If the blocks went
        # back to the engine earlier, bytes could land in the blocks of another request.
        self.context.transfers.set_deadline(transfer, None)
        is_placing = not transfer.outstanding.reads and transfer.is_confirmed
        if not transfer.outstanding.reads and not is_placing:
            self.context.handle_event(transfer, TransferEvent.MOVE_FAILED, now, transfer.reason)
            return
        self.context.events.append(TransferAbandoned(transfer.request, transfer.reason))
        self.stop(transfer)

    def extend_deadline(self, transfer: Transfer, now: float) -> None:
        """Extend the deadline of a transfer while the prefill makes progress.

        When all wanted tokens are ready, `receive_timeout_s` starts.
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


# -- reservations --
# Optional transfers: a request that the engine can compute must not fail because KV that would only
# have saved time is gone. So the consumer asks the producer before the engine allocates blocks. The
# answer within `confirm_timeout_s` is a reservation (the lease is held for us) or a refusal.


@dataclass(frozen=True, slots=True)
class Reservations:
    """Asks for and reports the reservations of optional transfers
    (docs/decisions/033-reuse.md).
    """

    context: ConsumerContext

    def await_answers(self, transfer: Transfer, peer: Peer, now: float) -> None:
        """For an optional transfer, wait until every rank has answered the attach with `Ready`."""
        if not transfer.origin.is_optional:
            return
        transfer.outstanding.ready_replies = set(peer.rank_mappings)
        self.context.transfers.set_deadline(transfer, now + self.context.settings.confirm_timeout_s)

    def note(self, transfer: Transfer, before: TransferState, now: float) -> None:
        """Report the reservation, the refusal or the result after a state transition."""
        if not transfer.origin.is_optional:
            return
        transfers, events = self.context.transfers, self.context.events
        match transfer.state:
            case TransferState.READY:
                # The producer may need the reserved blocks while our engine waits for free blocks,
                # so each side could wait for the other. The deadline resolves that deadlock.
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


# -- write grants --
# A consumer grants writes if one writable transport reaches all producer ranks of the request. A
# fenced transport accepts only writes under a valid grant id, and ends a grant by itself. Without a
# fence only the producer can end its writes: see `REVOKE_RETRY_S` and `GRACE_LEASES`.


MAX_GRANTED_BLOCKS = 400_000
"""Maximum number of blocks in one write grant: more do not fit into a message."""
REVOKE_RETRY_S = 1.0
"""Interval between `Revoke` messages of an unfenced grant, sent until the producer, or another
incarnation of its engine, answers.
"""
GRACE_LEASES = 10
"""Lease periods that a silent producer gets after its last one, before an unfenced grant counts as
revoked.

A silent producer stops writing by itself when its lease is not renewed. The grace covers whatever
may have delayed the producer (docs/decisions/030-push.md).
"""
REVOKING = (TransferState.RECLAIMING, TransferState.RETURNING, TransferState.STOPPING)
"""States in which a write grant is being revoked."""
_E = TransferEvent


@dataclass(slots=True)
class WriteGrants:
    """Grants a producer write access to the blocks of a transfer, and revokes the access."""

    context: ConsumerContext
    _last_grant_id: int = field(default=0, init=False)
    """A grant id is never used twice, so a late write cannot pass as a write of a newer grant."""

    def can_grant(self, transfer: Transfer, peer: Peer) -> bool:
        """Return whether the producer may write the KV of this transfer into our blocks.

        A producer with a host buffer cannot: its transports see a copy made for readers only.
        """
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
        """Issue a write grant on the blocks of a transfer, and register again with the grant.

        The fence opens first, so that no write can arrive before the transport knows the grant.
        """
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
                # Posted writes may still be landing, so the grant must be revoked before the blocks
                # are used. A `Revoked` that we did not ask for means the rank will not write.
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
        """Continue when the last rank has stopped writing: all is written, or it was revoked."""
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
        """Revoke the write grant of a transfer that has just entered a state of `REVOKING`.

        The blocks are used, or go back to the engine, only when the producer certainly cannot
        write any more.
        """
        if transfer.state is before:
            return
        if transfer.state is TransferState.STOPPING:
            self.context.events.append(TransferAbandoned(transfer.request, transfer.reason))
        if before is TransferState.FILLING:
            self.revoke(transfer, now)

    def revoke(self, transfer: Transfer, now: float) -> None:
        """Ask the producer to stop writing, and close the fence if the transport has one.

        With a fence, the transport reports when no write can land any more (`writes_revoked`).
        Without a fence, this is called again every `REVOKE_RETRY_S` until `revoke_deadline`.
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
            # Reconnect if the peer was lost: only the producer, or its successor, can answer.
            self.context.peers.ensure(
                transfer.incarnation, transfer.origin.address, transfer.origin.tp_size, now
            )

    def finish_revoke(self, transfer: Transfer, now: float) -> None:
        """Continue after a revoke: no write under the grant can land any more."""
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
