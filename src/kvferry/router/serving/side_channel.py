"""Messages from the router to side channels of engines.

The router releases P's blocks as soon as no reader will come, asks D for retained turns, and asks
engines why a transfer failed. Best effort: without the messages leases expire, P computes more and
errors say less, so no method waits, retries or raises. `SideChannelSender` owns the thread that
uses the transport.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from math import inf
from types import TracebackType
from typing import Protocol

from kvferry.errors import KVFerryError, RemoteProtocolError, TransportError
from kvferry.logs import repeats_of
from kvferry.protocol.messages import (
    FailureReply,
    FailureRequest,
    Message,
    Release,
    ReleaseLeg,
    RetainedTurnReply,
    RetainedTurnRequest,
    decode,
    encode,
)
from kvferry.router.serving.client_request import Handover
from kvferry.transports.base import ControlTransport, Disconnected
from kvferry.types import Address

_log = logging.getLogger(__name__)

# Connections unused for this long are closed: tickets may name side channels of engines that no
# longer exist.
_IDLE_CLOSE_S = 30.0
# At close, the last frames may still wait for their connection to be established.
_FLUSH_S = 0.25
_JOIN_S = 5.0
# Time for the thread to take the stop command, and to end.
_MAX_ASKED = 4096
"""Questions without an answer; beyond this number the oldest is cancelled."""
QUESTION_S = 10.0
"""How long a question about a turn stays open: D replies when it knows, however busy it is."""


@dataclass(frozen=True, slots=True)
class _Question:
    address: str
    message: Message
    answer: "Future[str]" = field(default_factory=Future)


class BlockReleaser(Protocol):
    """Frees blocks that P holds and no reader will fetch."""

    def release(self, handover: Handover) -> None:
        """Ask P to free the blocks. Returns at once and never raises."""

    def release_leg(self, side_channel: Address, leg_id: str) -> None:
        """Ask P to free the blocks of a prefill leg whose answer the router did not receive.
        Returns at once and never raises.
        """


class PrefilledBlocks:
    """P's blocks held for one request; released on exit unless D has taken the blocks over.

    `with PrefilledBlocks(releases, handover) as held: …; held.mark_handed_over()`

    In a push, P's answer may be lost when the legs are cancelled: P's front-end no longer sends it,
    but P's engine has computed the prompt and holds the blocks for a D that never registers. So the
    push ticket is released as well.
    """

    ready_at = -inf
    """When P had computed the blocks: until then D can only wait for them."""

    def __init__(
        self, releases: BlockReleaser, handover: Handover | None, push: Handover | None = None
    ) -> None:
        self._releases = releases
        self.handover = handover
        self._push = push
        if push is not None:
            self.ready_at = inf
        self._is_ours = handover is not None
        self._is_handed_over = False
        self._is_over = False

    def receive(self, handover: Handover) -> None:
        """Take P's answer to a prefill leg that runs beside the decode leg.

        The answer may arrive after `__exit__`; the blocks are then released at once.
        """
        self.handover = handover
        self._is_ours = not self._is_handed_over
        if self._is_over:
            self._release()

    def mark_handed_over(self) -> None:
        """Record that D has the ticket and answers. From now on D releases the blocks, whatever
        happens to the request.
        """
        self._is_ours, self._is_handed_over = False, True

    def reclaim(self) -> None:
        """Take the blocks back, because D failed after it had begun to answer."""
        self._is_ours, self._is_handed_over = self.handover is not None, False

    def __enter__(self) -> "PrefilledBlocks":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        if self._push is not None and not self._is_handed_over:
            self._releases.release(self._push)
        self._release()

    def _release(self) -> None:
        if self._is_ours and self.handover is not None:
            self._is_ours = False
            self._releases.release(self.handover)


class SideChannelSender:
    """One thread that owns a control transport and sends messages to side channels.

    `release`, `release_leg`, `query_turn` and `query_failure` may be called from any thread.
    """

    def __init__(self, control: ControlTransport, capacity: int = 1024) -> None:
        self._control = control
        self._inbox: queue.Queue[tuple[str, Message] | None] = queue.Queue(capacity)
        self._asked: dict[int, _Question] = {}
        self._nonces = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="kvferry-release")
        self._last_used: dict[str, float] = {}
        self.sent = 0
        self.dropped = 0

    def start(self) -> None:
        self._thread.start()

    def release(self, handover: Handover) -> None:
        ticket = handover.ticket or handover.push_ticket
        if not ticket or handover.side_channel is None:
            self.dropped += 1
            return
        self._put(_url(handover.side_channel), Release(ticket))

    def release_leg(self, side_channel: Address, leg_id: str) -> None:
        self._put(_url(side_channel), ReleaseLeg(leg_id))

    def query_turn(self, side_channel: Address, turn_id: str) -> "Future[str]":
        """Ask D which blocks of the turn are retained: JSON parameters, or "" for none.

        D may take `QUESTION_S` to reply, and the future may never complete, so the caller needs a
        deadline.
        """
        nonce = next(self._nonces)
        return self._ask(
            nonce,
            _Question(_url(side_channel), RetainedTurnRequest(nonce, turn_id, QUESTION_S)),
        )

    def query_failure(self, side_channel: Address, leg_id: str) -> "Future[str]":
        """Ask an engine why the transfer of a leg failed: the reason, or "" if it knows none.

        The future may never complete, so the caller needs a deadline.
        """
        nonce = next(self._nonces)
        return self._ask(nonce, _Question(_url(side_channel), FailureRequest(nonce, leg_id)))

    def _ask(self, nonce: int, question: _Question) -> "Future[str]":
        answer = question.answer
        self._asked[nonce] = question
        while len(self._asked) > _MAX_ASKED:
            self._asked.pop(next(iter(self._asked))).answer.cancel()
        answer.add_done_callback(lambda _: self._asked.pop(nonce, None))
        if not self._put(question.address, question.message):
            answer.cancel()
        return answer

    def _put(self, address: str, message: Message) -> bool:
        try:
            self._inbox.put_nowait((address, message))
        except queue.Full:
            self.dropped += 1
            return False
        self._control.wake()
        return True

    def close(self) -> None:
        """Send what is queued, stop the thread and close the transport. Idempotent."""
        if not self._thread.is_alive():
            return
        try:
            self._inbox.put(None, timeout=_JOIN_S)
        except queue.Full:
            raise TransportError(
                "the release thread does not read its inbox, so it cannot be closed"
            ) from None
        self._control.wake()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TransportError("the release thread did not stop in time")

    def _run(self) -> None:
        try:
            while self._send_queued():
                self._forget_idle(time.monotonic())
                # With connections open, wake up in time to close idle connections.
                for event in self._control.poll(_IDLE_CLOSE_S if self._last_used else None):
                    if isinstance(event, Disconnected):
                        self._last_used.pop(event.address, None)
                        self._ask_again(event.address)
                    else:
                        self._receive(event.frame)
        except Exception:
            _log.exception(
                "the release thread stopped: from now on, blocks of aborted requests stay held "
                "until their leases expire"
            )
        finally:
            self._control.close()

    def _send_queued(self) -> bool:
        """Send all queued messages; False when the stop command was found."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                if self._last_used:
                    self._control.poll(_FLUSH_S)
                return False
            self._send(*item)

    def _ask_again(self, address: str) -> None:
        """Send the open questions over a new connection: they were lost with the old one."""
        # The list is a copy, made in one step of the interpreter: another thread adds questions.
        for question in list(self._asked.values()):
            if question.address == address:
                self._send(address, question.message)

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except RemoteProtocolError as error:
            _log.warning("a message from a side channel cannot be decoded: %s", error)
            return
        if isinstance(message, RetainedTurnReply | FailureReply):
            question = self._asked.get(message.nonce)
            # The caller may cancel the future at this moment.
            if question is not None and question.answer.set_running_or_notify_cancel():
                question.answer.set_result(
                    message.params if isinstance(message, RetainedTurnReply) else message.reason
                )

    def _send(self, address: str, message: Message) -> None:
        try:
            self._control.send(address, encode(message))
        except KVFerryError as error:
            self.dropped += 1
            _log.warning(
                "message to a side channel not sent peer=%s: %s",
                address,
                error,
                extra=repeats_of(address),
            )
            return
        self.sent += 1
        self._last_used[address] = time.monotonic()

    def _forget_idle(self, now: float) -> None:
        for address in [
            address for address, used in self._last_used.items() if now - used >= _IDLE_CLOSE_S
        ]:
            self._control.forget(address)
            del self._last_used[address]


async def wait_for_answer(answer: "Future[str]", timeout_s: float) -> str | None:
    """The answer to a question; None if none arrives in time. Runs on the event loop."""
    waiting = asyncio.wrap_future(answer)
    try:
        await asyncio.wait([waiting], timeout=timeout_s)
        return waiting.result() if waiting.done() and not waiting.cancelled() else None
    finally:
        waiting.cancel()


def _url(side_channel: Address) -> str:
    return f"tcp://{side_channel}"
