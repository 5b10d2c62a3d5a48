"""How a consumer has its blocks filled by a producer that writes: which it has lent, and how it gets them back. Pure.

Blocks are lent where all ranks of the producer that a request goes to are reached by one transport that we may lend by. A transport with a
fence lets in what is written under the lease's number and nothing else, and ends that for certain when it is told to. Without a fence only
the producer itself can say that it writes no more: it is asked (`Revoke`), again and again, until it answers, or another incarnation of it
does. One that stays silent has stopped by itself when its lease was not renewed; it is given ten leases, for whatever may have held it up.
"""

from dataclasses import dataclass, field

from kvferry.errors import RemoteProtocolError
from kvferry.events import PrefillCompleted, TransferAbandoned
from kvferry.protocol.actions import GrantWrites, RevokeWrites, Send
from kvferry.protocol.consumer_parts import ConsumerContext
from kvferry.protocol.messages import MAX_NAME_CHARS, Revoke, Revoked, WriteFailed, WriteGrantInfo, Written
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import plan_permutations
from kvferry.protocol.pulls import Transfer, WriteGrant
from kvferry.protocol.transfers import TransferEvent, TransferState

__all__ = ["MAX_GRANTED_BLOCKS", "REVOKING", "WriteGrants"]

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
            permutations = plan_permutations(geometry, [peer.geometries[rank] for rank in peer.rank_mappings], to.blocks, to.tokens)
        except RemoteProtocolError as error:
            self.context.handle_event(transfer, _E.REFUSED, now, str(error))
            return
        to.permutations = tuple(permutations)
        [transport] = {peer.transports[rank] for rank in peer.rank_mappings}
        self._last_grant_id += 1
        transfer.to.write_grant = WriteGrant(
            self._last_grant_id, transport, transport in self.context.settings.fenced, set(peer.rank_mappings)
        )
        transfer.to.was_granted = True
        if transfer.to.write_grant.is_fenced:
            self.context.actions.append(GrantWrites(transport, transfer.to.write_grant.grant_id, to.filled_blocks(geometry.block_size)))
        self.context.client.register(transfer, peer, geometry.tp_size, now, self._lease(transfer, transfer.to.write_grant))
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
        if transfer is None or transfer.to.write_grant is None or transfer.to.write_grant.grant_id != message.grant_id:
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
                # What was written may still be landing, so this is no proof that it has stopped. One that gives back what nobody has
                # asked for has not written it.
                self.context.handle_event(transfer, _E.MOVE_FAILED, now, "")
            case Written():
                write_grant.writers.discard(rank)
                write_grant.note_end(message.left_tokens, message.early_bytes)
                self._note_writer_done(transfer, write_grant, is_filling, now)
            case Revoked():
                write_grant.writers.discard(rank)
                self._note_writer_done(transfer, write_grant, is_filled=False, now=now)

    def _note_writer_done(self, transfer: Transfer, write_grant: WriteGrant, is_filled: bool, now: float) -> None:
        """One rank will write no more: it has written all, or was asked to stop."""
        if write_grant.writers:
            return
        if is_filled:
            self.context.events.append(
                PrefillCompleted(transfer.request, len(transfer.to.tokens), write_grant.left_tokens, write_grant.early_bytes)
            )
            self.context.handle_event(transfer, _E.BYTES_MOVED, now, "")
        elif not write_grant.is_fenced:
            self.finish_revoke(transfer, now)

    def begin_revoke(self, transfer: Transfer, before: TransferState, now: float) -> None:
        """The blocks are used, or handed back, only when the producer can certainly write no more."""
        if transfer.state is before:
            return
        if transfer.state is TransferState.STOPPING:
            self.context.events.append(TransferAbandoned(transfer.request, transfer.reason))
        if before is TransferState.FILLING:
            self.revoke(transfer, now)

    def revoke(self, transfer: Transfer, now: float) -> None:
        """Have the producer write no more. Where there is a fence, its transport says when that is certain."""
        write_grant, peer = transfer.to.write_grant, self.context.peers.get(transfer.incarnation)
        assert write_grant is not None
        if write_grant.revoke_deadline is None:
            write_grant.revoke_deadline = now + (1 + GRACE_LEASES) * self.context.settings.registration_s
        if peer is not None and peer.is_ready:
            message = Revoke(transfer.incarnation.epoch, transfer.reader, write_grant.grant_id)
            self.context.actions.extend(Send(peer.control_address(rank), message) for rank in write_grant.writers)
        if write_grant.is_fenced:
            self.context.transfers.set_deadline(transfer, None)
            self.context.actions.append(RevokeWrites(transfer.request, write_grant.transport, write_grant.grant_id))
        elif not write_grant.writers or write_grant.revoke_deadline <= now:
            self.finish_revoke(transfer, now)
        else:
            self.context.transfers.set_deadline(transfer, now + REVOKE_RETRY_S)
            self.context.peers.ensure(transfer.incarnation, transfer.origin.address, transfer.origin.tp_size, now)

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
