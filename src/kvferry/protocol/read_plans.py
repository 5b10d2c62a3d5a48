"""What one pull reads from each of its producer's ranks. Pure."""

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import Pieces, plan_placement, plan_read
from kvferry.protocol.pulls import Pull

__all__ = ["is_complete", "next_tokens", "plan_reads", "tokens_to_read"]


def next_tokens(wanted: range, done_until: int, ready: int, grain: int) -> range:
    """What can be moved now and has not been. Where there is more to come, whole blocks of both sides: so many tokens."""
    if ready < wanted.stop:
        ready = ready // grain * grain
    start = max(wanted.start, done_until)
    return range(start, max(start, min(ready, wanted.stop)))


def tokens_to_read(ours: Geometry, pull: Pull, peer: Peer) -> range:
    """What can be read now and has not been."""
    if pull.origin.invitation is None:
        return pull.to.tokens
    grain = max(ours.block_size, pull.ticket.block_size)
    return next_tokens(pull.to.tokens, pull.arrival.read_until, _ready_tokens(pull, peer), grain)


def is_complete(pull: Pull, peer: Peer) -> bool:
    """Whether all that is wanted may be read, or all that there will ever be."""
    if pull.origin.invitation is None or not pull.is_offered:
        return pull.origin.invitation is None
    return _ready_tokens(pull, peer) >= min(pull.to.tokens.stop, pull.ticket.num_tokens)


def _ready_tokens(pull: Pull, peer: Peer) -> int:
    """Each rank says for itself how far it has come."""
    return min((pull.arrival.ready.get(rank, 0) for rank in peer.visits), default=0)


def plan_reads(ours: Geometry, pull: Pull, peer: Peer, tokens: range) -> dict[int, list[Pieces]]:
    """By rank, the KV of these tokens. The pull is told what is to be put in order once all is here. RemoteProtocolError when the ticket
    does not fit."""
    to, ticket = pull.to, pull.ticket
    visited = {rank: peer.geometries[rank] for rank in peer.visits}
    for geometry in visited.values():
        if geometry.block_size != ticket.block_size:
            raise RemoteProtocolError(f"the ticket counts blocks of {ticket.block_size} tokens, its engine's hold {geometry.block_size}")
    shared = pull.origin.shared_tokens
    if shared is not None and shared < to.tokens.stop:
        raise RemoteProtocolError(
            f"the prefill was of another prompt: {shared} tokens are known to be the same, {to.tokens.stop} are needed"
        )
    to.placements = tuple(plan_placement(ours, list(visited.values()), to.blocks, to.tokens))
    return {
        rank: plan_read(ours, geometry, peer.visits[rank].heads, to.blocks, ticket.block_ids(), tokens, to.needed_from)
        for rank, geometry in visited.items()
    }
