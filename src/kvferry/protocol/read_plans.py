"""What one pull reads from each of its producer's ranks. Pure."""

from kvferry.errors import RemoteProtocolError
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import Pieces, plan_placement, plan_read
from kvferry.protocol.pulls import Pull

__all__ = ["plan_reads"]


def plan_reads(ours: Geometry, pull: Pull, peer: Peer) -> dict[int, list[Pieces]]:
    """By rank. The pull is told what is to be put in order afterwards. RemoteProtocolError when the ticket does not fit."""
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
        rank: plan_read(ours, geometry, peer.visits[rank].heads, to.blocks, ticket.block_ids(), to.tokens, to.needed_from)
        for rank, geometry in visited.items()
    }
