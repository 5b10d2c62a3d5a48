"""The side channel of a scheduler: a socket for consumers, routers and released tickets.

Consumers ask how to reach the transfer workers, routers ask for the retained blocks of a turn and
why a transfer failed, and holders of tickets release tickets. One thread owns the socket. No
message can stop the thread: a handshake that cannot be served is refused in the reply, and a
malformed, forged or misplaced message is counted and dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import InvalidTicket, KVFerryError, RemoteProtocolError
from kvferry.logs import repeats_of
from kvferry.protocol import messages as codec
from kvferry.protocol.handshake import ServedEngine, answer
from kvferry.protocol.messages import (
    FailureReply,
    FailureRequest,
    HandshakeRequest,
    Release,
    ReleaseLeg,
    RetainedTurnReply,
    RetainedTurnRequest,
)
from kvferry.protocol.producer.leases import OpenQuestions, TextsById
from kvferry.protocol.tickets import PushTicketKey, TicketKey
from kvferry.transports.base import ControlTransport, Received, Route
from kvferry.types import EngineIncarnation
from kvferry.worker.commands import ReleasePushTicket, ReleaseTicket

MAX_RELEASED = 100_000
"""Releases that wait for the engine's thread; beyond this limit the oldest are dropped."""
MAX_TURNS = 10_000
MAX_FAILURES = 1000
FAILURE_S = 60.0
"""How long the reason of a failed transfer is kept for the router, which asks at once."""
MAX_REASON_CHARS = 1000
MAX_LEGS = 10_000
MAX_PUBLISHED = MAX_TURNS + MAX_FAILURES + MAX_LEGS
POLL_S = 1.0
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that has ended, and that a router may ask for by `turn_id`."""

    turn_id: str
    params: str = ""
    """KV transfer parameters of the turn, as JSON; empty if nothing is retained."""
    lease_ttl_s: float = 0.0


class SideChannel:
    """Serves handshakes, released tickets and retained turns on a dedicated thread."""

    def __init__(
        self,
        control: ControlTransport,
        served: ServedEngine,
        keys: tuple[TicketKey, PushTicketKey],
        wake_engine: Callable[[], None],
    ) -> None:
        self._control = control
        self._served = served
        self._keys = keys
        self._wake_engine = wake_engine
        self._released: deque[ReleaseTicket | ReleasePushTicket] = deque(maxlen=MAX_RELEASED)
        self._published: deque[EndedTurn | tuple[str, str | ReleaseTicket]] = deque(
            maxlen=MAX_PUBLISHED
        )
        """Ended turns, and by leg id reasons of failures and releases of tickets. The engine's
        thread appends; the side channel's thread pops.
        """
        self._turns = TextsById(MAX_TURNS)
        """The parameters of ended turns, by turn id; empty if nothing is retained."""
        self._failures = TextsById(MAX_FAILURES)
        """The reasons of failed transfers, by leg id."""
        self._legs: dict[str, ReleaseTicket | None] = {}
        """How to release each finished prefill leg, by leg id; None if a router has released the
        leg before its end. Beyond `MAX_LEGS` the oldest is forgotten: its lease then expires.
        """
        self._questions: OpenQuestions[tuple[Route, int]] = OpenQuestions()
        """Questions about turns that have not ended; each asker is a route and a nonce."""
        self._expire_at = 0.0
        self._num_dropped = 0
        self._num_dropped_reported = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvferry-side-channel", daemon=True)

    def take_num_dropped(self) -> int:
        """Return how many messages since the last call were malformed, forged or of a type not
        handled here.
        """
        before, self._num_dropped_reported = self._num_dropped_reported, self._num_dropped
        return self._num_dropped_reported - before

    @property
    def has_released(self) -> bool:
        return bool(self._released)

    def start(self) -> None:
        self._thread.start()

    # -- calls of the engine's thread, which never wait --

    def serve(self, served: ServedEngine) -> None:
        """Answer handshakes with this from now on."""
        self._served = served

    def take_released(self) -> list[ReleaseTicket | ReleasePushTicket]:
        """Take the tickets that were released since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def publish_turn(self, turn: EndedTurn) -> None:
        """Answer requests for `turn.turn_id` with this turn from now on."""
        self._published.append(turn)
        self._control.wake()

    def publish_failure(self, leg_id: str, reason: str) -> None:
        """Answer questions about a router's leg with the reason why its transfer failed. Called
        before the engine reports the failure to its client.
        """
        self._published.append((leg_id, reason[:MAX_REASON_CHARS]))

    def publish_leg(self, leg_id: str, release: ReleaseTicket) -> None:
        """Let the router that chose `leg_id` release the leg's ticket by this id. Called when the
        ticket is issued; if the router has already released the leg, the ticket is released within
        `POLL_S`.
        """
        self._published.append((leg_id, release))

    def close(self) -> None:
        """Stop the thread and close the socket. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.ident is None:
            self._control.close()
            return
        self._control.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVFerryError(f"the side channel did not stop within {CLOSE_TIMEOUT_S:g} s")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                arrived = self._control.poll(POLL_S)
                # What the engine has published is stored before the messages are answered, so that
                # a router's request never overtakes it.
                self._store_published(time.monotonic())
                for received in arrived:
                    if isinstance(received, Received):
                        self._take(received)
                self._expire_questions(time.monotonic())
        finally:
            self._control.close()

    def _take(self, received: Received) -> None:
        try:
            message = codec.decode(received.frame)
            match message:
                case HandshakeRequest():
                    self._control.reply(received.route, codec.encode(answer(self._served, message)))
                case Release(ticket):
                    self._release(ticket)
                case ReleaseLeg(leg_id):
                    self._release_leg(leg_id)
                case RetainedTurnRequest():
                    self._take_question(received.route, message, time.monotonic())
                case FailureRequest(nonce, leg_id):
                    reason = self._failures.find(leg_id, time.monotonic()) or ""
                    self._control.reply(
                        received.route, codec.encode(FailureReply(nonce, leg_id, reason))
                    )
                case _:
                    raise RemoteProtocolError(
                        f"a side channel does not accept a {type(message).__name__}"
                    )
        except KVFerryError as error:
            self._num_dropped += 1
            _log.info("side channel dropped a message: %s", error, extra=repeats_of())
        except Exception:  # boundary for one message: no message may stop the thread
            self._num_dropped += 1
            _log.exception("side channel failed on a message")

    def _take_question(self, route: Route, asked: RetainedTurnRequest, now: float) -> None:
        """Answer a router's question, or keep it until the turn ends."""
        params = self._turns.find(asked.turn_id, now)
        is_open = (
            params is None
            and asked.wait_s > 0
            and self._questions.ask(asked.turn_id, (route, asked.nonce), now + asked.wait_s)
        )
        if not is_open:
            self._reply(route, asked.nonce, asked.turn_id, params or "")

    def _store_published(self, now: float) -> None:
        while self._published:
            match self._published.popleft():
                case EndedTurn(turn_id, params, lease_ttl_s):
                    self._turns.add(turn_id, params, now + lease_ttl_s)
                    for route, nonce in self._questions.take(turn_id):
                        self._reply(route, nonce, turn_id, params)
                case leg_id, str(reason):
                    self._failures.add(leg_id, reason, now + FAILURE_S)
                case leg_id, ReleaseTicket() as release:
                    if leg_id in self._legs and self._legs.pop(leg_id) is None:
                        self._pass_on(release)
                    else:
                        self._remember_leg(leg_id, release)

    def _expire_questions(self, now: float) -> None:
        if now >= self._expire_at:
            self._expire_at = now + POLL_S
            for turn_id, (route, nonce) in self._questions.expire(now):
                self._reply(route, nonce, turn_id, "")

    def _reply(self, route: Route, nonce: int, turn_id: str, params: str) -> None:
        try:
            frame = codec.encode(RetainedTurnReply(nonce, turn_id, params))
        except KVFerryError as error:  # the parameters of this turn are too long for a message
            _log.info("side channel cannot describe a turn: %s", error)
            frame = codec.encode(RetainedTurnReply(nonce, turn_id))
        self._control.reply(route, frame)

    def _release(self, text: str) -> None:
        ticket_key, push_key = self._keys
        released: ReleaseTicket | ReleasePushTicket
        try:
            ticket = ticket_key.open(text)
            owner = ticket.incarnation
            released = ReleaseTicket(ticket.lease, ticket.serial)
        except InvalidTicket:
            push_ticket = push_key.open(text)
            owner = push_ticket.incarnation
            released = ReleasePushTicket(push_ticket.match_id)
        if owner != EngineIncarnation(self._served.engine, self._served.epoch):
            raise InvalidTicket("a router released a ticket of another incarnation of this engine")
        self._pass_on(released)

    def _release_leg(self, leg_id: str) -> None:
        release = self._legs.pop(leg_id, None)
        if release is not None:
            self._pass_on(release)
        else:
            # The engine may still compute the leg. The message does not wake the engine: anyone who
            # reaches this port can send ids that no leg has.
            self._remember_leg(leg_id, None)

    def _remember_leg(self, leg_id: str, release: ReleaseTicket | None) -> None:
        self._legs[leg_id] = release
        while len(self._legs) > MAX_LEGS:
            del self._legs[next(iter(self._legs))]

    def _pass_on(self, released: ReleaseTicket | ReleasePushTicket) -> None:
        self._released.append(released)
        self._wake_engine()
