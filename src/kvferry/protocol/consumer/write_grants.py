"""How a consumer grants a producer write access to its blocks, and revokes the grant.

A consumer grants writes if one writable transport reaches all producer ranks of the request. A
fenced transport accepts only writes under a valid grant id, and ends a grant by itself. Without a
fence only the producer can end its writes: see `REVOKE_RETRY_S` and `GRACE_LEASES`. Pure.
"""

from kvferry.errors import RemoteProtocolError
from kvferry.events import PrefillCompleted, TransferAbandoned
from kvferry.protocol.actions import GrantWrites, RevokeWrites, Send
from kvferry.protocol.consumer.context import ConsumerContext
from kvferry.protocol.consumer.states import GRANTED, TransferEvent, TransferState
from kvferry.protocol.consumer.transfer import Transfer, WriteGrant
from kvferry.protocol.messages import (
    MAX_NAME_CHARS,
    Revoke,
    Revoked,
    WriteFailed,
    WriteGrantInfo,
    Written,
)
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning.plan import plan_permutations

_S, _E = TransferState, TransferEvent

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


def can_grant(context: ConsumerContext, transfer: Transfer, peer: Peer) -> bool:
    """Return whether the producer may write the KV of this transfer into our blocks.

    A producer with a host buffer cannot: its transports see a copy made for readers only.
    """
    used = {peer.transports[rank] for rank in peer.rank_mappings}
    return (
        transfer.origin.push_info is not None
        and transfer.has_blocks
        and not transfer.is_offered
        and transfer.to.write_grant is None
        and sum(map(len, transfer.to.blocks)) <= MAX_GRANTED_BLOCKS
        and len(transfer.request) <= MAX_NAME_CHARS
        and len(used) == 1
        and used <= context.settings.writable_transports
        and not any(peer.layouts[rank].uses_host_buffer for rank in peer.rank_mappings)
    )


def prepare_grant(context: ConsumerContext, transfer: Transfer, peer: Peer) -> None:
    """Plan how the written blocks will be rearranged; the grant follows in FILLING."""
    to, geometries = transfer.to, [peer.geometries[rank] for rank in peer.rank_mappings]
    try:
        to.permutations = tuple(
            plan_permutations(context.geometry, geometries, to.blocks, to.tokens)
        )
    except RemoteProtocolError as error:
        context.post(transfer, _E.REFUSED, str(error))
        return
    context.post(transfer, _E.WRITES_GRANTED)


def grant_writes(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Issue a write grant on the blocks of a transfer, and register again with the grant.

    The fence opens first, so that no write can arrive before the transport knows the grant.
    """
    peer, to = context.peers.get(transfer.incarnation), transfer.to
    assert peer is not None
    [transport] = {peer.transports[rank] for rank in peer.rank_mappings}
    to.write_grant = grant = WriteGrant(
        next(context.grant_ids),
        transport,
        transport in context.settings.fenced,
        set(peer.rank_mappings),
    )
    if grant.is_fenced:
        blocks = to.filled_blocks(context.geometry.block_size)
        context.outbox.perform(GrantWrites(transport, grant.grant_id, blocks))
    context.client.register(
        transfer, peer, context.geometry.tp_size, now, _grant_info(context, transfer, grant)
    )


def _grant_info(context: ConsumerContext, transfer: Transfer, grant: WriteGrant) -> WriteGrantInfo:
    push_info, to = transfer.origin.push_info, transfer.to
    assert push_info is not None
    return WriteGrantInfo(
        grant_id=grant.grant_id,
        transport=grant.transport,
        tp_rank=context.geometry.tp_rank,
        local_block_ids=[list(group) for group in to.blocks],
        first_token=to.tokens.start,
        end_token=to.tokens.stop,
        needed_from=list(to.needed_from),
        tokens=push_info.tokens,
    )


def receive_write_report(
    context: ConsumerContext, address: str, message: Written | WriteFailed | Revoked, now: float
) -> None:
    """Handle what one producer rank reports about its writes under a grant."""
    transfer = context.transfers.of_reader(message.reader)
    if transfer is None or transfer.state not in GRANTED:
        return
    grant = transfer.to.write_grant
    assert grant is not None
    rank = context.peers.rank_at(transfer.incarnation, address, grant.writers)
    if rank is None or grant.grant_id != message.grant_id:
        return
    is_filling = transfer.state is _S.FILLING
    match message:
        case Written(is_last=False):
            if is_filling and transfer.arrival.note(rank, message.tokens, now):
                transfer.to.give_up_at = now + context.settings.push_registration_timeout_s
                context.transfers.set_deadline(transfer, transfer.to.give_up_at)
        case WriteFailed() | Revoked() if is_filling:
            # Posted writes may still be landing, so the grant must be revoked before the blocks are
            # used. A `Revoked` that we did not ask for means the rank will not write.
            context.post(transfer, _E.MOVE_FAILED)
        case Written():
            grant.writers.discard(rank)
            grant.note_end(message.left_tokens, message.early_bytes)
            _note_writer_done(context, transfer, grant)
        case Revoked():
            grant.writers.discard(rank)
            _note_writer_done(context, transfer, grant)


def _note_writer_done(context: ConsumerContext, transfer: Transfer, grant: WriteGrant) -> None:
    """Continue when the last rank has stopped writing: all is written, or it was revoked."""
    if grant.writers:
        return
    if transfer.state is _S.FILLING:
        num_tokens = len(transfer.to.tokens)
        context.outbox.report(
            PrefillCompleted(transfer.request, num_tokens, grant.left_tokens, grant.early_bytes)
        )
        context.post(transfer, _E.BYTES_MOVED)
    elif not grant.is_fenced:
        context.post(transfer, _E.WRITES_REVOKED)


def begin_revoke(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Revoke the write grant, unless an earlier state has begun to revoke the grant.

    The blocks are used, or go back to the engine, only when the producer certainly cannot write any
    more.
    """
    grant = transfer.to.write_grant
    assert grant is not None
    if grant.revoke_deadline is None:
        grant.revoke_deadline = now + (1 + GRACE_LEASES) * context.settings.lease_ttl_s
        revoke(context, transfer, now)


def abandon_writes(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    context.outbox.report(TransferAbandoned(transfer.request, transfer.reason))
    begin_revoke(context, transfer, now)


def revoke(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Ask the producer to stop writing, and close the fence if the transport has one.

    With a fence, the transport reports when no write can land any more (`writes_revoked`).
    Without a fence, the consumer calls again every `REVOKE_RETRY_S` until `revoke_deadline`.
    """
    grant, peer = transfer.to.write_grant, context.peers.get(transfer.incarnation)
    assert grant is not None
    assert grant.revoke_deadline is not None
    if peer is not None and peer.is_ready:
        message = Revoke(transfer.incarnation.epoch, transfer.reader, grant.grant_id)
        context.outbox.actions.extend(
            Send(peer.control_address(rank), message) for rank in grant.writers
        )
    if grant.is_fenced:
        context.transfers.set_deadline(transfer, None)
        context.outbox.perform(RevokeWrites(transfer.request, grant.transport, grant.grant_id))
    elif not grant.writers or grant.revoke_deadline <= now:
        context.post(transfer, _E.WRITES_REVOKED)
    else:
        context.transfers.set_deadline(transfer, now + REVOKE_RETRY_S)
        # Reconnect if the peer was lost: only the producer, or its successor, can answer.
        context.peers.ensure(
            transfer.incarnation, transfer.origin.address, transfer.origin.tp_size, now
        )
