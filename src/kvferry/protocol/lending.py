"""How a consumer has its blocks filled by a producer that writes: which it has lent, and how it gets them back. Pure.

Blocks are lent where all ranks of the producer that a request goes to are reached by one plane that we may lend by. A plane with a fence
lets in what is written under the lease's number and nothing else, and ends that for certain when it is told to. Without a fence only the
producer itself can say that it writes no more: it is asked (`Revoke`), again and again, until it answers, or another life of it does. One
that stays silent has stopped by itself when its lease was not renewed; it is given ten leases, for whatever may have held it up.
"""

from dataclasses import dataclass, field

from kvferry.errors import RemoteProtocolError
from kvferry.events import PrefillCompleted, PullGivenUp
from kvferry.protocol.actions import Lend, Send, TakeBack
from kvferry.protocol.consumer_parts import ConsumerParts
from kvferry.protocol.messages import MAX_NAME_CHARS, Revoke, Revoked, WriteFailed, WriteLease, Written
from kvferry.protocol.peers import Peer
from kvferry.protocol.planning import plan_placement
from kvferry.protocol.pulls import Loan, Pull
from kvferry.protocol.transfers import TransferEvent, TransferState

__all__ = ["MAX_LENT_BLOCKS", "TAKING_BACK", "Lending"]

MAX_LENT_BLOCKS = 400_000
"""Of a lease: more do not fit into a message."""
ASK_AGAIN_S = 1.0
LEASES_OF_GRACE = 10
TAKING_BACK = (TransferState.RECLAIMING, TransferState.RETURNING, TransferState.STOPPING)
_E = TransferEvent


@dataclass(slots=True)
class Lending:
    parts: ConsumerParts
    _last_number: int = field(default=0, init=False)

    def can_lend(self, pull: Pull, peer: Peer) -> bool:
        """Whether the producer may write what this request wants."""
        used = {peer.planes[rank] for rank in peer.visits}
        return (
            pull.origin.invitation is not None
            and pull.has_blocks
            and not pull.is_offered
            and not pull.to.was_lent
            and sum(map(len, pull.to.blocks)) <= MAX_LENT_BLOCKS
            and len(pull.request) <= MAX_NAME_CHARS
            and len(used) == 1
            and used <= self.parts.settings.lends_by
            and not any(peer.layouts[rank].is_staged for rank in peer.visits)
        )

    def lend(self, pull: Pull, peer: Peer, now: float) -> None:
        """Register anew, with the blocks."""
        geometry, to = self.parts.geometry, pull.to
        try:
            placements = plan_placement(geometry, [peer.geometries[rank] for rank in peer.visits], to.blocks, to.tokens)
        except RemoteProtocolError as error:
            self.parts.meet(pull, _E.REFUSED, now, str(error))
            return
        to.placements = tuple(placements)
        [plane] = {peer.planes[rank] for rank in peer.visits}
        self._last_number += 1
        pull.to.loan = Loan(self._last_number, plane, plane in self.parts.settings.fenced, set(peer.visits))
        pull.to.was_lent = True
        if pull.to.loan.is_fenced:
            self.parts.actions.append(Lend(plane, pull.to.loan.number, to.filled_blocks(geometry.block_size)))
        self.parts.talk.register(pull, peer, geometry.tp_size, now, self._lease(pull, pull.to.loan))
        self.parts.meet(pull, _E.BLOCKS_LENT, now, "")

    def _lease(self, pull: Pull, loan: Loan) -> WriteLease:
        invitation, to = pull.origin.invitation, pull.to
        assert invitation is not None
        return WriteLease(
            number=loan.number,
            plane=loan.plane,
            tp_rank=self.parts.geometry.tp_rank,
            local_block_ids=[list(group) for group in to.blocks],
            first_token=to.tokens.start,
            end_token=to.tokens.stop,
            needed_from=list(to.needed_from),
            tokens=invitation.tokens,
        )

    def receive(self, address: str, message: Written | WriteFailed | Revoked, now: float) -> None:
        pull = self.parts.pulls.of_reader(message.reader)
        if pull is None or pull.to.loan is None or pull.to.loan.number != message.number:
            return
        loan = pull.to.loan
        rank = self.parts.peers.rank_at(pull.life, address, loan.writers)
        if rank is None:
            return
        is_filling = pull.state is TransferState.FILLING
        match message:
            case Written(is_last=False):
                if is_filling and pull.arrival.note(rank, message.tokens, now):
                    pull.to.give_up_at = now + self.parts.settings.offer_timeout_s
                    self.parts.pulls.set_deadline(pull, pull.to.give_up_at)
            case WriteFailed() | Revoked() if is_filling:
                # What was written may still be landing, so this is no proof that it has stopped. One that gives back what nobody has
                # asked for has not written it.
                self.parts.meet(pull, _E.MOVE_FAILED, now, "")
            case Written():
                loan.writers.discard(rank)
                loan.note_end(message.left_tokens, message.early_bytes)
                self._note_return(pull, loan, is_filling, now)
            case Revoked():
                loan.writers.discard(rank)
                self._note_return(pull, loan, is_filled=False, now=now)

    def _note_return(self, pull: Pull, loan: Loan, is_filled: bool, now: float) -> None:
        """One rank will write no more: it has written all, or was asked to stop."""
        if loan.writers:
            return
        if is_filled:
            self.parts.events.append(PrefillCompleted(pull.request, len(pull.to.tokens), loan.left_tokens, loan.early_bytes))
            self.parts.meet(pull, _E.BYTES_MOVED, now, "")
        elif not loan.is_fenced:
            self.back(pull, now)

    def take_back(self, pull: Pull, before: TransferState, now: float) -> None:
        """The blocks are used, or handed back, only when the producer can certainly write no more."""
        if pull.state is before:
            return
        if pull.state is TransferState.STOPPING:
            self.parts.events.append(PullGivenUp(pull.request, pull.reason))
        if before is TransferState.FILLING:
            self.ask_back(pull, now)

    def ask_back(self, pull: Pull, now: float) -> None:
        """Have the producer write no more. Where there is a fence, its plane says when that is certain."""
        loan, peer = pull.to.loan, self.parts.peers.get(pull.life)
        assert loan is not None
        if loan.back_at is None:
            loan.back_at = now + (1 + LEASES_OF_GRACE) * self.parts.settings.registration_s
        if peer is not None and peer.is_ready:
            message = Revoke(pull.life.epoch, pull.reader, loan.number)
            self.parts.actions.extend(Send(peer.control_address(rank), message) for rank in loan.writers)
        if loan.is_fenced:
            self.parts.pulls.set_deadline(pull, None)
            self.parts.actions.append(TakeBack(pull.request, loan.plane, loan.number))
        elif not loan.writers or loan.back_at <= now:
            self.back(pull, now)
        else:
            self.parts.pulls.set_deadline(pull, now + ASK_AGAIN_S)
            self.parts.peers.ensure(pull.life, pull.origin.address, pull.origin.tp_size, now)

    def back(self, pull: Pull, now: float) -> None:
        """Nothing that was written under this loan lands any more."""
        if pull.state not in TAKING_BACK:
            return
        pull.to.loan = None
        match pull.state:
            case TransferState.RECLAIMING:
                self.parts.meet(pull, _E.CONFIRMED, now, "")
            case TransferState.RETURNING:
                self.parts.meet(pull, _E.BYTES_MOVED, now, "")
            case _:
                self.parts.meet(pull, _E.MOVE_FAILED, now, pull.reason)
