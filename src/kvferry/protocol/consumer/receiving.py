"""What a consumer does when a transfer enters a state: the table `ON_ENTER` and its functions.

A transfer fills its blocks by reading from the producer, or by granting the producer writes. An
optional transfer first asks for a reservation. `Consumer` (`consumer.py`) applies the
events of transfers one after the other, and calls the function of each state that a transfer
enters. Such a function may post further events; it never applies an event itself.

Pure: the functions append actions and events to the lists of the `ConsumerContext`.
"""

from collections.abc import Callable

from kvferry.errors import RemoteProtocolError
from kvferry.events import (
    HandshakeFailed,
    PrefillCompleted,
    ReservationGranted,
    ReservationRefused,
    RetainedBlocksFetched,
    TransferAbandoned,
    TransferFailed,
    TransferFinished,
)
from kvferry.protocol.actions import PlaceBlocks, StartRead, StopRead
from kvferry.protocol.consumer.context import ConsumerContext
from kvferry.protocol.consumer.states import GRANTED, TransferEvent, TransferState
from kvferry.protocol.consumer.transfer import ReaderStatus, Transfer, next_tokens
from kvferry.protocol.consumer.write_grants import (
    abandon_writes,
    begin_revoke,
    can_grant,
    grant_writes,
    prepare_grant,
)
from kvferry.protocol.peers import LostPeer, Peer
from kvferry.protocol.planning.geometry import Geometry
from kvferry.protocol.planning.plan import (
    Segments,
    check_prefill,
    plan_permutations,
    plan_read,
)
from kvferry.types import EngineIncarnation, PeerId

_S, _E = TransferState, TransferEvent


# -- the producer --
# How a transfer makes itself known to its producer, and what happens when the producer withdraws
# its offer or is lost.


def contact_producer(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Grant the producer writes, or attach or register if the producer does not know the reader.

    While the handshake is running, do nothing: the consumer calls again when the peer is ready.
    """
    peer = context.peers.get(transfer.incarnation)
    assert peer is not None
    if not peer.is_ready:
        return
    if can_grant(context, transfer, peer):
        prepare_grant(context, transfer, peer)
    elif transfer.reader_status is ReaderStatus.UNKNOWN:
        if transfer.is_offered:
            attach(context, transfer, peer, now)
        else:
            context.client.register(transfer, peer, context.geometry.tp_size, now)


def attach(context: ConsumerContext, transfer: Transfer, peer: Peer, now: float) -> None:
    """Attach to the lease of the ticket, and wait for `Ready` from the ranks that will send it.

    For an optional transfer every rank answers: the reservation is granted when all have answered.
    """
    context.client.attach(transfer, peer, now)
    is_optional = transfer.origin.is_optional
    transfer.outstanding.ready_replies = {
        rank for rank in peer.rank_mappings if is_optional or peer.layouts[rank].uses_host_buffer
    }
    if is_optional:
        context.transfers.set_deadline(transfer, now + context.settings.confirm_timeout_s)
    if not transfer.outstanding.ready_replies:
        context.post(transfer, _E.PEER_READY)


def _restart(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Reset a transfer whose offer was withdrawn, or whose writes have failed, and register again.

    If the transfer has blocks, `BLOCKS_ALLOCATED` follows, as if the blocks came now.
    """
    context.client.stop_heartbeats(transfer)
    transfer.arrival = transfer.arrival.restarted(
        transfer.ticket.serial if transfer.is_offered else transfer.arrival.last_serial
    )
    transfer.outstanding.ready_replies.clear()
    transfer.origin.ticket, transfer.origin.ticket_text = None, ""
    # The reads were cancelled because of the withdrawal; a later failure has another reason.
    transfer.reason = ""
    extend_deadline(context, transfer, now)
    if transfer.has_blocks:
        context.post(transfer, _E.BLOCKS_ALLOCATED)
    else:
        contact_producer(context, transfer, now)


def lose_peer(context: ConsumerContext, lost: LostPeer) -> None:
    """Report a lost peer, and post the loss to each transfer that comes from the peer."""
    context.outbox.report(
        HandshakeFailed(lost.incarnation.engine, lost.reason, lost.is_incompatible)
    )
    context.client.forget(lost)
    for transfer in context.transfers.of_incarnation(lost.incarnation):
        if transfer.is_known_to_producer:
            transfer.reader_status = ReaderStatus.UNKNOWN
        grant, is_revoking = (
            transfer.to.write_grant,
            transfer.state in (_S.AWAITING_REVOKED, _S.REVOKING),
        )
        if lost.is_over and is_revoking and grant is not None and not grant.is_fenced:
            # The process that could have written has ended. A fenced grant still waits for its
            # transport, because bytes that the process had sent may be in flight.
            context.post(transfer, _E.WRITES_REVOKED)
        else:
            context.post(transfer, _E.PEER_LOST, lost.reason)
    for user in context.peer_users:
        user.peer_lost(lost)


# -- reservations --
# Optional transfers: a request that the engine can compute must not fail because KV that would only
# have saved time is gone. So the consumer asks the producer before the engine allocates blocks. The
# answer within `confirm_timeout_s` is a reservation (the lease is held for us) or a refusal
# (docs/decisions/033-reuse.md).


def _report_reservation(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    if transfer.origin.is_optional:
        # The producer may need the reserved blocks while our engine waits for free blocks, so each
        # side could wait for the other. The deadline resolves that deadlock.
        context.transfers.set_deadline(transfer, now + context.settings.confirm_timeout_s)
        context.outbox.report(ReservationGranted(transfer.request))


def _report_refusal(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    if transfer.origin.is_optional:
        context.transfers.set_deadline(transfer, None)
        context.outbox.report(ReservationRefused(transfer.request, transfer.reason))
    # A failing transfer may wait a long time for its blocks, only to fail then. Detach now, so that
    # no producer rank holds blocks for the transfer meanwhile.
    context.client.send_detach(transfer)


# -- reading --
# The consumer reads in steps while the prefill computes, and asks the producer to confirm.


def _start_reads(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Start a read of every token that is ready and not read yet."""
    settings, peer = context.settings, context.peers.get(transfer.incarnation)
    assert peer is not None
    tokens = _tokens_to_read(context.geometry, transfer, peer)
    if not tokens and transfer.origin.push_info is not None and not _is_complete(transfer, peer):
        context.post(transfer, _E.CAUGHT_UP)
        return
    context.transfers.set_deadline(
        transfer, min(transfer.to.give_up_at, now + settings.read_timeout_s)
    )
    try:
        plans = _plan_reads(context.geometry, transfer, peer, tokens)
    except RemoteProtocolError as error:
        context.post(transfer, _E.MOVE_FAILED, str(error))
        return
    transfer.arrival.post(
        tokens.stop, sum(part.total_bytes for segments in plans.values() for part in segments)
    )
    transfer.outstanding.reads = set(plans)
    context.client.announce_read(transfer, peer, list(plans), now)
    for rank, segments in plans.items():
        context.outbox.perform(
            StartRead(transfer.request, peer.peer_id(rank), peer.transports[rank], tuple(segments))
        )


def _await_tokens(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    context.transfers.set_deadline(transfer, transfer.to.give_up_at)


def _stop_reads(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Cancel the reads in flight; the transport still reports the end of each read."""
    for rank in transfer.outstanding.reads:
        context.outbox.perform(
            StopRead(
                transfer.request,
                PeerId(transfer.incarnation.engine, transfer.incarnation.epoch, rank),
            )
        )


def _abandon(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Give up a transfer whose blocks are still being read into or rearranged."""
    # No deadline: a transport reports the end of every read, and the block store the end of
    # placing. If the blocks went back to the engine earlier, bytes could land in the blocks of
    # another request.
    context.transfers.set_deadline(transfer, None)
    context.outbox.report(TransferAbandoned(transfer.request, transfer.reason))
    _stop_reads(context, transfer, now)


def _ask_confirmation(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    peer = context.peers.get(transfer.incarnation)
    assert peer is not None
    context.transfers.set_deadline(
        transfer, min(transfer.to.give_up_at, now + context.settings.confirm_timeout_s)
    )
    transfer.outstanding.confirmations = set(peer.rank_mappings)
    context.client.ask_confirmation(transfer, peer)


def extend_deadline(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Extend the deadline of a transfer while the prefill makes progress.

    When all wanted tokens are ready, `receive_timeout_s` starts.
    """
    if not transfer.has_blocks:
        return
    settings, arrival, peer = (
        context.settings,
        transfer.arrival,
        context.peers.get(transfer.incarnation),
    )
    if not arrival.is_complete and peer is not None and _is_complete(transfer, peer):
        arrival.is_complete = True
        transfer.to.give_up_at = now + settings.receive_timeout_s
        if transfer.origin.push_info is not None:
            wanted = transfer.to.tokens
            num_left = wanted.stop - max(wanted.start, arrival.landed_until)
            context.outbox.report(
                PrefillCompleted(transfer.request, len(wanted), num_left, arrival.landed_bytes)
            )
    elif not arrival.is_complete:
        transfer.to.give_up_at = arrival.progressed_at + settings.push_registration_timeout_s
    if not transfer.outstanding.reads and transfer.state is not _S.CONFIRMING:
        context.transfers.set_deadline(transfer, transfer.to.give_up_at)


# -- placing and the end --


def _place(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    # The bytes are confirmed and the producer is no longer involved. The rest is local work without
    # a deadline: the blocks go back to the engine when nothing writes into them.
    context.transfers.set_deadline(transfer, None)
    context.client.release(transfer)
    uses_host_buffer = context.settings.uses_host_buffer
    if transfer.to.permutations or uses_host_buffer:
        block_size = context.geometry.block_size
        blocks = transfer.to.filled_blocks(block_size) if uses_host_buffer else ()
        context.outbox.perform(PlaceBlocks(transfer.request, transfer.to.permutations, blocks))
    else:
        context.post(transfer, _E.PLACED)


def _finish(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    context.transfers.remove(transfer)
    if transfer.origin.is_optional:
        context.outbox.report(
            RetainedBlocksFetched(
                transfer.request, len(transfer.to.tokens), transfer.arrival.landed_bytes
            )
        )
    context.outbox.report(TransferFinished(transfer.request, transfer.times))


def _give_up(context: ConsumerContext, transfer: Transfer, now: float) -> None:
    """Detach a transfer that has failed or is not needed; report a failure if it had blocks."""
    context.transfers.remove(transfer)
    context.client.send_detach(transfer)
    if transfer.has_blocks:
        reason = transfer.reason or "the request was aborted"
        context.outbox.report(TransferFailed(transfer.request, reason, transfer.times))
    if transfer.read_error:
        _drop_unreadable_peer(context, transfer.incarnation, transfer.read_error, now)


def _drop_unreadable_peer(
    context: ConsumerContext, incarnation: EngineIncarnation, reason: str, now: float
) -> None:
    """Drop a peer after a failed read, so that the next request starts a new handshake: the
    transport may have closed its connection for good.

    Every transfer from the peer fails. The control connection may still work, so the consumer
    detaches their readers before it closes the connection. Otherwise the producer would hold their
    blocks until the leases end.
    """
    for transfer in context.transfers.of_incarnation(incarnation):
        if transfer.state not in GRANTED:
            context.client.send_detach(transfer)
    lost = context.peers.lose(incarnation, reason, now)
    if lost is not None:
        lose_peer(context, lost)


ON_ENTER: dict[TransferState, Callable[[ConsumerContext, Transfer, float], None]] = {
    _S.TRACKED: _restart,
    _S.READY: _report_reservation,
    _S.WAITING: contact_producer,
    _S.MOVING: _start_reads,
    _S.CAUGHT_UP: _await_tokens,
    _S.RETURNING: _stop_reads,
    _S.STOPPING: _abandon,
    _S.FILLING: grant_writes,
    _S.AWAITING_REVOKED: begin_revoke,
    _S.RETURNING_BLOCKS: begin_revoke,
    _S.REVOKING: abandon_writes,
    _S.CONFIRMING: _ask_confirmation,
    _S.PLACING: _place,
    _S.DISCARDING: _abandon,
    _S.FAILING: _report_refusal,
    _S.DONE: _finish,
    _S.FAILED: _give_up,
    _S.ENDED: _give_up,
}
"""What the consumer does when a transition leads into a state, also from the same state.

A new transfer is in TRACKED without having entered it: `_restart` is for withdrawn offers.
"""


# -- read plans --
# Which tokens a transfer can read now, and which segments it reads from each producer rank.


def _tokens_to_read(ours: Geometry, transfer: Transfer, peer: Peer) -> range:
    """Return the tokens that can be read now and have not been read; in pull, all of them."""
    if transfer.origin.push_info is None:
        return transfer.to.tokens
    granularity = max(ours.block_size, transfer.ticket.block_size)
    return next_tokens(
        transfer.to.tokens, transfer.arrival.read_until, _ready_tokens(transfer, peer), granularity
    )


def _is_complete(transfer: Transfer, peer: Peer) -> bool:
    """Return whether all wanted tokens may be read, or at least all tokens of the ticket."""
    if transfer.origin.push_info is None or not transfer.is_offered:
        return transfer.origin.push_info is None
    return _ready_tokens(transfer, peer) >= min(transfer.to.tokens.stop, transfer.ticket.num_tokens)


def _ready_tokens(transfer: Transfer, peer: Peer) -> int:
    """Return the number of tokens that are ready on every rank; ranks progress independently."""
    return min((transfer.arrival.ready.get(rank, 0) for rank in peer.rank_mappings), default=0)


def _plan_reads(
    ours: Geometry, transfer: Transfer, peer: Peer, tokens: range
) -> dict[int, list[Segments]]:
    """Plan the reads of these tokens, by producer rank.

    Also stores in the transfer how its blocks must be rearranged once all bytes have arrived.
    Raises RemoteProtocolError if the ticket does not fit the producer's geometry or our prompt.
    """
    to, ticket = transfer.to, transfer.ticket
    visited = {rank: peer.geometries[rank] for rank in peer.rank_mappings}
    for geometry in visited.values():
        if geometry.block_size != ticket.block_size:
            raise RemoteProtocolError(
                f"the ticket counts blocks of {ticket.block_size} tokens, but its engine's blocks "
                f"hold {geometry.block_size}"
            )
    end, shared = to.tokens.stop, transfer.origin.shared_tokens
    check_prefill(ours, ticket.num_tokens, end if shared is None else shared, end)
    to.permutations = tuple(plan_permutations(ours, list(visited.values()), to.blocks, to.tokens))
    return {
        rank: plan_read(ours, geometry, to.blocks, ticket.block_ids(), tokens, to.needed_from)
        for rank, geometry in visited.items()
    }
