"""What a consumer says to its producers' ranks: greetings, heartbeats, questions and farewells. Pure.

Messages are appended to the consumer's actions. Which of them to send, and when, is the consumer's to decide.
"""

from kvferry.protocol.actions import Action, Send
from kvferry.protocol.heartbeats import READ_BEGINS, HeartbeatSchedule, heartbeat_interval_s
from kvferry.protocol.messages import (
    MAX_LEASES_PER_BEAT,
    MAX_NAME_CHARS,
    Attach,
    Confirm,
    Detach,
    Heartbeat,
    PushCancel,
    PushRegistration,
    WriteLease,
)
from kvferry.protocol.peers import LostPeer, Peer, PeerBook
from kvferry.protocol.pulls import Pull, reader_name
from kvferry.types import EngineLife, PeerId, RequestId

__all__ = ["ReaderTalk"]

MAX_FAREWELLS = 10_000
ANNOUNCE_AFTER_S = 0.5
"""A read that begins so long after its reader was last heard of is announced."""


class ReaderTalk:
    def __init__(self, life: EngineLife, peers: PeerBook, registration_s: float, actions: list[Action]) -> None:
        """`life`: ours; `registration_s`: how long a producer remembers a registration without a heartbeat."""
        self._engine, self._epoch = life.engine, life.epoch
        self._peers = peers
        self._registration_s = registration_s
        self._actions = actions
        self._beats: HeartbeatSchedule[PeerId] = HeartbeatSchedule()
        self._farewells: dict[EngineLife, list[Pull]] = {}

    # -- one pull's way ----------------------------------------------------------------------------------------------

    def register(self, pull: Pull, peer: Peer, own_tp_size: int, now: float, write: WriteLease | None = None) -> None:
        """Ask to be told when there is something to read, or to have it written."""
        invitation = pull.origin.invitation
        assert invitation is not None
        message = PushRegistration(
            epoch=pull.life.epoch,
            reader=pull.reader,
            request_id=_sent_name(pull),
            decode_engine_id=self._engine,
            decode_host=invitation.own_address.host,
            decode_port=invitation.own_address.port,
            decode_tp_size=own_tp_size,
            lease_s=self._registration_s,
            handover=invitation.handover,
            push_ticket=invitation.push_ticket,
            decode_epoch=self._epoch,
            write=write,
        )
        self._to_all_ranks(peer, message)
        if not pull.is_attached:
            self._start_beats(pull, peer, self._registration_s, now)

    def attach(self, pull: Pull, peer: Peer, now: float) -> None:
        pull.heard_at = now
        self._send_attach(pull, peer)
        self._start_beats(pull, peer, pull.ticket.lease_s, now)

    def announce_read(self, pull: Pull, peer: Peer, ranks: list[int], now: float) -> None:
        if now < pull.heard_at + ANNOUNCE_AFTER_S:
            return
        # The producer may look at its planes rarely by now.
        pull.heard_at = now
        beat = Heartbeat(pull.life.epoch, READ_BEGINS, [pull.lease])
        self._actions += [Send(peer.control_address(rank), beat) for rank in ranks]

    def ask_confirmation(self, pull: Pull, peer: Peer) -> None:
        self._to_all_ranks(peer, Confirm(pull.life.epoch, pull.lease, pull.reader, pull.ticket.serial))

    def say_farewell(self, pull: Pull) -> None:
        """It needs nothing any more. A producer that is still being shaken hands with is told when it can be."""
        peer = self._peers.get(pull.life)
        if peer is None:
            return
        if pull.is_attached:
            self.stop_beats(pull)
            self._to_all_ranks(peer, self._farewell(pull))
        elif not peer.is_ready and sum(map(len, self._farewells.values())) < MAX_FAREWELLS:
            self._farewells.setdefault(pull.life, []).append(pull)

    def say_late_farewells(self, peer: Peer) -> None:
        for pull in self._farewells.pop(peer.life, []):
            if pull.is_offered:
                self._send_attach(pull, peer)
            self._to_all_ranks(peer, self._farewell(pull))

    def rename(self, old: EngineLife, new: EngineLife) -> None:
        """A producer that was known by its address only has said which life it is."""
        for pull in self._farewells.pop(old, []):
            pull.origin.life = new
            self._farewells.setdefault(new, []).append(pull)

    def stop_beats(self, pull: Pull) -> None:
        pull.is_attached = False
        peer = self._peers.get(pull.life)
        for rank in peer.visits if peer is not None else ():
            self._beats.untrack(PeerId(pull.life.engine, pull.life.epoch, rank), pull.lease)

    # -- heartbeats --------------------------------------------------------------------------------------------------

    def send_beats(self, now: float) -> None:
        for beat in self._beats.due(now):
            peer = self._peers.get(beat.peer.life)
            if peer is not None and peer.is_ready:
                for first in range(0, len(beat.leases), MAX_LEASES_PER_BEAT):
                    part: list[str] = list(beat.leases[first : first + MAX_LEASES_PER_BEAT])
                    message = Heartbeat(beat.peer.epoch, beat.number, part)
                    self._actions.append(Send(peer.control_address(beat.peer.tp_rank), message))

    def note_answer(self, peer_id: PeerId, beat: int) -> None:
        self._beats.answered(peer_id, beat)

    def silent_peers(self, now: float) -> list[PeerId]:
        return self._beats.lost(now)

    def forget(self, lost: LostPeer) -> None:
        for rank in lost.ranks:
            self._beats.forget(PeerId(lost.life.engine, lost.life.epoch, rank))
        self._farewells.pop(lost.life, None)

    def next_deadline(self) -> float | None:
        return self._beats.next_deadline()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _send_attach(self, pull: Pull, peer: Peer) -> None:
        for rank, visit in peer.visits.items():
            names = [reader_name(self._engine, pull.request, visitor) for visitor in visit.visitors]
            companions = [name for name in names if name != pull.reader]
            message = Attach(pull.origin.ticket_text, pull.reader, peer.planes[rank], companions, pull.origin.is_optional)
            self._actions.append(Send(peer.control_address(rank), message))

    def _farewell(self, pull: Pull) -> Detach | PushCancel:
        if pull.is_offered:
            return Detach(pull.life.epoch, pull.lease, pull.reader)
        invitation = pull.origin.invitation
        assert invitation is not None
        return PushCancel(pull.life.epoch, pull.reader, _sent_name(pull), self._engine, invitation.handover, invitation.push_ticket)

    def _start_beats(self, pull: Pull, peer: Peer, lease_s: float, now: float) -> None:
        pull.is_attached = True
        for rank in peer.visits:
            self._beats.track(peer.peer_id(rank), RequestId(pull.lease), heartbeat_interval_s(lease_s), now)

    def _to_all_ranks(self, peer: Peer, message: Confirm | Detach | PushRegistration | PushCancel) -> None:
        self._actions += [Send(peer.control_address(rank), message) for rank in peer.visits]


def _sent_name(pull: Pull) -> str:
    """Its request id; where that is too long for a message, none, and the handover alone decides."""
    return pull.request if len(pull.request) <= MAX_NAME_CHARS else ""
