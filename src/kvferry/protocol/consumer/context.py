"""Objects that a consumer's modules share: settings, client for producers, event queue.

`Consumer` (`consumer.py`) builds the objects; the functions of `receiving.py` use them. Pure:
messages to producers are appended to the consumer's outbox, and the caller passes `now`.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from kvferry.protocol.actions import Send
from kvferry.protocol.consumer.states import TransferEvent, TransferState
from kvferry.protocol.consumer.transfer import ReaderStatus, Transfer, TransferTable, reader_name
from kvferry.protocol.heartbeats import READ_BEGINS, HeartbeatSchedule, heartbeat_interval_s
from kvferry.protocol.messages import (
    MAX_LEASES_PER_HEARTBEAT,
    MAX_NAME_CHARS,
    Attach,
    Confirm,
    Detach,
    Heartbeat,
    PushCancel,
    PushRegistration,
    WriteGrantInfo,
)
from kvferry.protocol.outbox import Outbox
from kvferry.protocol.peers import LostPeer, Peer, PeerSettings, PeerTable, PeerUser
from kvferry.protocol.planning.geometry import Geometry
from kvferry.types import EngineId, EngineIncarnation, Epoch, PeerId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """Settings of a consumer: timeouts, and the transports that producers may write with."""

    engine: EngineId
    peers: PeerSettings
    read_timeout_s: float
    """Maximum duration of one read."""
    confirm_timeout_s: float
    """How long the consumer waits for `Confirmed`, for a reservation, or for reserved transfers to
    get blocks.
    """
    receive_timeout_s: float
    """Maximum time until confirmation, counted from when all KV is ready (in pull: from `start`).
    """
    uses_host_buffer: bool = False
    """Whether transports write into a host buffer, from which blocks are copied to the engine."""
    queue_timeout_s: float = 480.0
    """How long a request may wait for blocks of our engine while the producer holds its KV."""
    step_timeout_s: float = 60.0
    """How long our engine may be silent before the consumer stops its heartbeats."""
    push_registration_timeout_s: float = 480.0
    """How long a push request with blocks waits for the producer's offer, or for more tokens."""
    lease_ttl_s: float = 30.0
    """How long a producer keeps a registration without a heartbeat."""
    epoch: Epoch | None = None
    """Epoch of this incarnation of our engine."""
    writable_transports: frozenset[str] = frozenset()
    """Transports with which a producer may write into our blocks in push."""
    fenced: frozenset[str] = frozenset()
    """Transports whose local side can reject writes after their grant is revoked."""

    def overdue_reason(self, transfer: Transfer, now: float) -> str:
        """Return the failure reason for a transfer whose deadline has passed."""
        match transfer.state:
            case TransferState.CAUGHT_UP:
                return f"the prefill made no progress within {self.push_registration_timeout_s:g} s"
            case TransferState.MOVING if now < transfer.to.give_up_at:
                return f"the read did not finish within {self.read_timeout_s:g} s"
            case TransferState.FILLING if transfer.arrival.ready:
                return f"the prefill made no progress within {self.push_registration_timeout_s:g} s"
            case TransferState.CONFIRMING if now < transfer.to.give_up_at:
                return f"the producer did not confirm the read within {self.confirm_timeout_s:g} s"
            case TransferState.WAITING | TransferState.FILLING if not transfer.is_offered:
                return (
                    "the prefill engine offered no blocks within "
                    f"{self.push_registration_timeout_s:g} s"
                )
            case TransferState.TRACKED if transfer.origin.is_optional:
                return f"the producer did not answer within {self.confirm_timeout_s:g} s"
            case TransferState.READY if transfer.origin.is_optional:
                return f"the decode engine allocated no blocks within {self.confirm_timeout_s:g} s"
            case TransferState.TRACKED | TransferState.READY:
                return f"the decode engine allocated no blocks within {self.queue_timeout_s:g} s"
            case _:
                return f"the KV did not arrive within {self.receive_timeout_s:g} s"


# -- producer client --
# Composes the messages to producer ranks: registrations, attaches, heartbeats, confirms, detaches.
# `Consumer` and its parts decide which message to send, and when.


MAX_DEFERRED_DETACHES = 10_000
"""Maximum number of detach messages that wait for a handshake. Further ones are dropped, and their
leases expire.
"""
ANNOUNCE_AFTER_S = 0.5
"""A read that starts later than this after the last attach or announcement is announced.

The value is below the producer's `READ_WATCH_S`: within that time the producer still polls its
transports often (docs/decisions/019-many-leases.md).
"""


class ProducerClient:
    """Sends messages to the ranks of producers and schedules the heartbeats of leases."""

    def __init__(
        self,
        incarnation: EngineIncarnation,
        peers: PeerTable,
        lease_ttl_s: float,
        outbox: Outbox,
    ) -> None:
        """Create a client; `incarnation` is our own, and `lease_ttl_s` says how long a producer
        keeps a registration without a heartbeat.
        """
        self._engine, self._epoch = incarnation.engine, incarnation.epoch
        self._peers = peers
        self._lease_ttl_s = lease_ttl_s
        self._actions = outbox.actions
        self.heartbeats: HeartbeatSchedule[PeerId] = HeartbeatSchedule()
        self._deferred_detaches: dict[EngineIncarnation, list[Transfer]] = {}

    # -- messages of one transfer --

    def register(
        self,
        transfer: Transfer,
        peer: Peer,
        own_tp_size: int,
        now: float,
        write: WriteGrantInfo | None = None,
    ) -> None:
        """Register the request with every rank, so that the producer sends an offer or writes.

        With `write`, the registration carries a write grant and replaces an earlier registration.
        """
        push_info = transfer.origin.push_info
        assert push_info is not None
        message = PushRegistration(
            epoch=transfer.incarnation.epoch,
            reader=transfer.reader,
            request_id=_sent_name(transfer),
            decode_engine_id=self._engine,
            decode_host=push_info.own_address.host,
            decode_port=push_info.own_address.port,
            decode_tp_size=own_tp_size,
            lease_ttl_s=self._lease_ttl_s,
            match_id=push_info.match_id,
            push_ticket=push_info.push_ticket,
            decode_epoch=self._epoch,
            write=write,
        )
        self._to_all_ranks(peer, message)
        if transfer.reader_status is ReaderStatus.UNKNOWN:
            transfer.reader_status = ReaderStatus.REGISTERED
            self._start_heartbeats(transfer, peer, self._lease_ttl_s, now)

    def attach(self, transfer: Transfer, peer: Peer, now: float) -> None:
        transfer.announced_at = now
        self._send_attach(transfer, peer)
        transfer.reader_status = ReaderStatus.ATTACHED
        self._start_heartbeats(transfer, peer, transfer.ticket.lease_ttl_s, now)

    def announce_read(self, transfer: Transfer, peer: Peer, ranks: list[int], now: float) -> None:
        """Announce a read to the producer, unless the last announcement is recent."""
        if now < transfer.announced_at + ANNOUNCE_AFTER_S:
            return
        # By now the producer may poll its transports rarely, and some transports need its help.
        transfer.announced_at = now
        beat = Heartbeat(transfer.incarnation.epoch, READ_BEGINS, [transfer.lease])
        self._actions += [Send(peer.control_address(rank), beat) for rank in ranks]

    def ask_confirmation(self, transfer: Transfer, peer: Peer) -> None:
        self._to_all_ranks(
            peer,
            Confirm(
                transfer.incarnation.epoch, transfer.lease, transfer.reader, transfer.ticket.serial
            ),
        )

    def send_detach(self, transfer: Transfer) -> None:
        """Detach a transfer that needs nothing more from the producer.

        While the handshake with the producer is still running, the message is deferred.
        """
        peer = self._peers.get(transfer.incarnation)
        if peer is None:
            return
        if transfer.is_known_to_producer:
            self.stop_heartbeats(transfer)
            self._to_all_ranks(peer, self._detach_message(transfer))
        elif (
            transfer.reader_status is ReaderStatus.UNKNOWN
            and not peer.is_ready
            and sum(map(len, self._deferred_detaches.values())) < MAX_DEFERRED_DETACHES
        ):
            self._deferred_detaches.setdefault(transfer.incarnation, []).append(transfer)

    def send_deferred_detaches(self, peer: Peer) -> None:
        """Send the detach messages that were waiting for the handshake with this peer."""
        for transfer in self._deferred_detaches.pop(peer.incarnation, []):
            # Only an attached reader can settle the lease by detaching.
            if transfer.is_offered:
                self._send_attach(transfer, peer)
            self._to_all_ranks(peer, self._detach_message(transfer))

    def rename(self, old: EngineIncarnation, new: EngineIncarnation) -> None:
        """File deferred detaches under the incarnation of a producer known only by address."""
        for transfer in self._deferred_detaches.pop(old, []):
            transfer.origin.incarnation = new
            self._deferred_detaches.setdefault(new, []).append(transfer)

    def release(self, transfer: Transfer) -> None:
        """Note that the producer has detached the reader, because every byte has arrived."""
        self.stop_heartbeats(transfer)
        transfer.reader_status = ReaderStatus.RELEASED

    def stop_heartbeats(self, transfer: Transfer) -> None:
        transfer.reader_status = ReaderStatus.UNKNOWN
        peer = self._peers.get(transfer.incarnation)
        for rank in peer.rank_mappings if peer is not None else ():
            self.heartbeats.untrack(
                PeerId(transfer.incarnation.engine, transfer.incarnation.epoch, rank),
                transfer.lease,
            )

    # -- heartbeats --

    def send_heartbeats(self, now: float) -> None:
        for beat in self.heartbeats.due(now):
            peer = self._peers.get(beat.peer.incarnation)
            if peer is not None and peer.is_ready:
                for first in range(0, len(beat.leases), MAX_LEASES_PER_HEARTBEAT):
                    part: list[str] = list(beat.leases[first : first + MAX_LEASES_PER_HEARTBEAT])
                    message = Heartbeat(beat.peer.epoch, beat.number, part)
                    self._actions.append(Send(peer.control_address(beat.peer.tp_rank), message))

    def forget(self, lost: LostPeer) -> None:
        for rank in lost.ranks:
            self.heartbeats.forget(PeerId(lost.incarnation.engine, lost.incarnation.epoch, rank))
        self._deferred_detaches.pop(lost.incarnation, None)

    # -- internals --

    def _send_attach(self, transfer: Transfer, peer: Peer) -> None:
        for rank, rank_mapping in peer.rank_mappings.items():
            names = [
                reader_name(self._engine, transfer.request, visitor)
                for visitor in rank_mapping.consumer_ranks
            ]
            sibling_ranks = [name for name in names if name != transfer.reader]
            message = Attach(
                transfer.origin.ticket_text,
                transfer.reader,
                peer.transports[rank],
                sibling_ranks,
                transfer.origin.is_optional,
            )
            self._actions.append(Send(peer.control_address(rank), message))

    def _detach_message(self, transfer: Transfer) -> Detach | PushCancel:
        if transfer.is_offered:
            return Detach(transfer.incarnation.epoch, transfer.lease, transfer.reader)
        push_info = transfer.origin.push_info
        assert push_info is not None
        return PushCancel(
            transfer.incarnation.epoch,
            transfer.reader,
            _sent_name(transfer),
            self._engine,
            push_info.match_id,
            push_info.push_ticket,
        )

    def _start_heartbeats(
        self, transfer: Transfer, peer: Peer, lease_ttl_s: float, now: float
    ) -> None:
        for rank in peer.rank_mappings:
            self.heartbeats.track(
                peer.peer_id(rank),
                RequestId(transfer.lease),
                heartbeat_interval_s(lease_ttl_s),
                now,
            )

    def _to_all_ranks(
        self, peer: Peer, message: Confirm | Detach | PushRegistration | PushCancel
    ) -> None:
        self._actions += [Send(peer.control_address(rank), message) for rank in peer.rank_mappings]


def _sent_name(transfer: Transfer) -> str:
    """Return the request id to send, or "" if the id is too long for a message.

    Without a request id, the producer matches by match id alone.
    """
    return transfer.request if len(transfer.request) <= MAX_NAME_CHARS else ""


# -- context --
# What the functions of `receiving.py` share with the consumer.


class QueuedEvent(NamedTuple):
    """An event that a transfer has yet to meet; `reason` matters if the event is a failure."""

    transfer: Transfer
    event: TransferEvent
    reason: str


@dataclass(frozen=True, slots=True)
class ConsumerContext:
    """Tables, client, event queue and output lists of one consumer."""

    settings: ConsumerSettings
    peers: PeerTable
    client: ProducerClient
    outbox: Outbox
    """Shared with `peers` and `client`."""
    transfers: TransferTable = field(default_factory=TransferTable)
    queue: deque[QueuedEvent] = field(default_factory=deque)
    """Events of transfers that `Consumer` has not handled yet, in order."""
    peer_users: list[PeerUser] = field(default_factory=list)
    grant_ids: Iterator[int] = field(default_factory=lambda: count(1))
    """A grant id is never used twice, so a late write cannot pass as a write of a newer grant."""

    @property
    def geometry(self) -> Geometry:
        """Geometry of our own rank."""
        return self.settings.peers.geometry

    def post(self, transfer: Transfer, event: TransferEvent, reason: str = "") -> None:
        """Queue an event of a transfer."""
        self.queue.append(QueuedEvent(transfer, event, reason))
