"""What one pull reads from each of its producer's ranks. Pure."""

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import Segments, plan_permutations, plan_read
from kvferry.protocol.pulls import Transfer

__all__ = ["is_complete", "next_tokens", "plan_reads", "tokens_to_read"]


def next_tokens(wanted: range, done_until: int, ready: int, granularity: int) -> range:
    """What can be moved now and has not been. Where there is more to come, whole blocks of both sides: so many tokens."""
    if ready < wanted.stop:
        ready = ready // granularity * granularity
    start = max(wanted.start, done_until)
    return range(start, max(start, min(ready, wanted.stop)))


def tokens_to_read(ours: Geometry, transfer: Transfer, peer: Peer) -> range:
    """What can be read now and has not been."""
    if transfer.origin.push_info is None:
        return transfer.to.tokens
    granularity = max(ours.block_size, transfer.ticket.block_size)
    return next_tokens(transfer.to.tokens, transfer.arrival.read_until, _ready_tokens(transfer, peer), granularity)


def is_complete(transfer: Transfer, peer: Peer) -> bool:
    """Whether all that is wanted may be read, or all that there will ever be."""
    if transfer.origin.push_info is None or not transfer.is_offered:
        return transfer.origin.push_info is None
    return _ready_tokens(transfer, peer) >= min(transfer.to.tokens.stop, transfer.ticket.num_tokens)


def _ready_tokens(transfer: Transfer, peer: Peer) -> int:
    """Each rank says for itself how far it has come."""
    return min((transfer.arrival.ready.get(rank, 0) for rank in peer.rank_mappings), default=0)


def plan_reads(ours: Geometry, transfer: Transfer, peer: Peer, tokens: range) -> dict[int, list[Segments]]:
    """By rank, the KV of these tokens. The pull is told what is to be put in order once all is here. RemoteProtocolError when the ticket
    does not fit."""
    to, ticket = transfer.to, transfer.ticket
    visited = {rank: peer.geometries[rank] for rank in peer.rank_mappings}
    for geometry in visited.values():
        if geometry.block_size != ticket.block_size:
            raise RemoteProtocolError(f"the ticket counts blocks of {ticket.block_size} tokens, its engine's hold {geometry.block_size}")
    shared = transfer.origin.shared_tokens
    if shared is not None and shared < to.tokens.stop:
        raise RemoteProtocolError(
            f"the prefill was of another prompt: {shared} tokens are known to be the same, {to.tokens.stop} are needed"
        )
    to.permutations = tuple(plan_permutations(ours, list(visited.values()), to.blocks, to.tokens))
    return {
        rank: plan_read(ours, geometry, peer.rank_mappings[rank].heads, to.blocks, ticket.block_ids(), tokens, to.needed_from)
        for rank, geometry in visited.items()
    }
