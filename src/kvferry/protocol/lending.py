"""The consumer's half of a push by writing: which blocks it has lent to a producer, and how it gets them back. Pure.

Blocks are lent where all ranks of the producer that a request goes to are reached by one plane that we may lend by. A plane with a fence
lets in what is written under the lease's number and nothing else, and ends that for certain when it is told to. Without a fence only the
producer itself can say that it writes no more: it is asked (`Revoke`), again and again, until it answers, or another life of it does. One
that stays silent has stopped by itself when its lease was not renewed; it is given ten leases, for whatever may have held it up.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from kvferry.protocol.actions import Action, Lend, Send, TakeBack
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.messages import Revoke, WriteLease
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import plan_placement
from kvferry.protocol.pulls import Loan, Pull

__all__ = ["ASK_AGAIN_S", "Lending"]

ASK_AGAIN_S = 1.0
LEASES_OF_GRACE = 10
MAX_LENT_BLOCKS = 400_000
"""Of one request: their ids go in one message. What has more is read."""


@dataclass(slots=True)
class Lending:
    """`planes`: those we lend by; `fenced`: of our planes, those that let in only what was lent."""

    geometry: Geometry
    planes: Collection[str]
    fenced: Collection[str]
    lease_s: float
    """How long a producer goes on writing without a heartbeat."""
    actions: list[Action]
    _last_number: int = field(default=0, init=False)

    def can_lend(self, pull: Pull, peer: Peer) -> bool:
        """Whether the producer may write what this request wants."""
        used = {peer.planes[rank] for rank in peer.visits}
        return (
            pull.origin.invitation is not None
            and pull.has_blocks
            and not pull.is_offered
            and not pull.was_lent
            and sum(map(len, pull.to.blocks)) <= MAX_LENT_BLOCKS
            and len(used) == 1
            and used <= set(self.planes)
            and not any(peer.layouts[rank].is_staged for rank in peer.visits)
        )

    def lend(self, pull: Pull, peer: Peer) -> WriteLease:
        """What to tell each rank of the producer. RemoteProtocolError where its blocks cannot be put into our order."""
        invitation, to = pull.origin.invitation, pull.to
        assert invitation is not None
        to.placements = tuple(plan_placement(self.geometry, [peer.geometries[rank] for rank in peer.visits], to.blocks, to.tokens))
        [plane] = {peer.planes[rank] for rank in peer.visits}
        self._last_number += 1
        pull.loan = Loan(self._last_number, plane, plane in self.fenced, set(peer.visits))
        pull.was_lent = True
        if pull.loan.is_fenced:
            self.actions.append(Lend(plane, pull.loan.number, to.filled_blocks(self.geometry.block_size)))
        return WriteLease(
            number=pull.loan.number,
            plane=plane,
            tp_rank=self.geometry.tp_rank,
            local_block_ids=[list(group) for group in to.blocks],
            first_token=to.tokens.start,
            end_token=to.tokens.stop,
            needed_from=list(to.needed_from),
            tokens=invitation.tokens,
        )

    def take_back(self, pull: Pull, peer: Peer | None, now: float) -> bool:
        """Have the producer write no more. Whether that is certain already; where a plane has a fence, the plane says when it is."""
        loan = pull.loan
        assert loan is not None
        if loan.back_at is None:
            loan.back_at = now + (1 + LEASES_OF_GRACE) * self.lease_s
        if loan.is_fenced:
            self.actions.append(TakeBack(pull.request, loan.plane, loan.number))
        if peer is not None and peer.is_ready:
            message = Revoke(pull.life.epoch, pull.reader, loan.number)
            self.actions += [Send(peer.control_address(rank), message) for rank in loan.writers if rank in peer.visits]
        return not loan.is_fenced and (not loan.writers or loan.back_at <= now)
