"""The router's word with side channels: P's blocks are given back at once when nobody will come for
them, and D is asked what it has kept of a conversation's turn.

Best effort. Without it leases run out by themselves and P computes a little more, so nothing here
waits, retries or raises.
"""

import itertools
import logging
import queue
import threading
import time
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol

from kvferry.errors import KVFerryError, RemoteProtocolError, TransportError
from kvferry.protocol.messages import (
    Message,
    Release,
    RetainedTurnReply,
    RetainedTurnRequest,
    decode,
    encode,
)
from kvferry.router.serving.client_request import Handover
from kvferry.transports.base import ControlTransport, Disconnected
from kvferry.types import Address

__all__ = ["BlockReleaser", "NullReleaser", "PrefilledBlocks", "SideChannelSender"]

_log = logging.getLogger(__name__)

# A connection that has carried nothing for this long is closed: tickets may name side channels of
# engines long gone.
_IDLE_CLOSE_S = 30.0
# Frames sent in the last moment need a connection that may still be in the making.
_FLUSH_S = 0.25
_JOIN_S = 5.0
_MAX_ASKED = 4096
"""Questions without an answer; the oldest is given up beyond that."""


class BlockReleaser(Protocol):
    def release(self, handover: Handover) -> None:
        """Ask P to free the blocks. Never waits, never raises."""


class NullReleaser:
    """For clusters without a side channel: leases run out by themselves."""

    def release(self, handover: Handover) -> None:
        return None


class PrefilledBlocks:
    """P's blocks on behalf of one request: released when the block ends before D has taken over.

    `with Held(releases, handover) as held: …; held.mark_handed_over()`
    """

    def __init__(self, releases: BlockReleaser, handover: Handover | None) -> None:
        self._releases = releases
        self.handover = handover
        self._is_ours = handover is not None
        self._is_handed_over = False
        self._is_over = False

    def receive(self, handover: Handover) -> None:
        """P's answer to a leg that was started together with D's. It may come after the end."""
        self.handover = handover
        self._is_ours = not self._is_handed_over
        if self._is_over:
            self._release()

    def mark_handed_over(self) -> None:
        """D has the ticket and answers; from now on it releases by itself, whatever happens to the
        request.
        """
        self._is_ours, self._is_handed_over = False, True

    def reclaim(self) -> None:
        """D died after all."""
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
        self._release()

    def _release(self) -> None:
        if self._is_ours and self.handover is not None:
            self._is_ours = False
            self._releases.release(self.handover)


class SideChannelSender:
    """One thread that owns a control transport and speaks to side channels over it. `release` and
    `query_turn` may be called from any thread.
    """

    def __init__(self, control: ControlTransport, capacity: int = 1024) -> None:
        self._control = control
        self._inbox: queue.Queue[tuple[str, Message] | None] = queue.Queue(capacity)
        self._asked: dict[int, Future[str]] = {}
        self._nonces = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="kvferry-release")
        self._last_used: dict[str, float] = {}
        self.sent = 0
        self.dropped = 0

    def start(self) -> None:
        self._thread.start()

    def release(self, handover: Handover) -> None:
        if handover.ticket is None or handover.side_channel is None:
            self.dropped += 1
            return
        self._put(handover.side_channel, Release(ticket=handover.ticket))

    def query_turn(self, side_channel: Address, turn_id: str) -> "Future[str]":
        """What is kept of the turn of this word, as JSON; empty: nothing. There may be no answer:
        whoever asks has a deadline.
        """
        answer: Future[str] = Future()
        nonce = next(self._nonces)
        self._asked[nonce] = answer
        while len(self._asked) > _MAX_ASKED:
            self._asked.pop(next(iter(self._asked))).cancel()
        answer.add_done_callback(lambda _: self._asked.pop(nonce, None))
        if not self._put(side_channel, RetainedTurnRequest(nonce, turn_id)):
            answer.cancel()
        return answer

    def _put(self, side_channel: Address, message: Message) -> bool:
        try:
            self._inbox.put_nowait((f"tcp://{side_channel}", message))
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
                "the release thread takes nothing from its inbox and cannot be closed"
            ) from None
        self._control.wake()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            raise TransportError("the release thread did not stop in time")

    def _run(self) -> None:
        try:
            while self._send_queued():
                self._forget_idle(time.monotonic())
                for event in self._control.poll(_IDLE_CLOSE_S if self._last_used else None):
                    if isinstance(event, Disconnected):
                        self._last_used.pop(event.address, None)
                    else:
                        self._receive(event.frame)
        except Exception:
            _log.exception(
                "the release thread stops: blocks of aborted requests are freed by their leases "
                "from now on"
            )
        finally:
            self._control.close()

    def _send_queued(self) -> bool:
        """False once told to close."""
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

    def _receive(self, frame: bytes) -> None:
        try:
            message = decode(frame)
        except RemoteProtocolError as error:
            _log.warning("a side channel's answer cannot be read: %s", error)
            return
        if isinstance(message, RetainedTurnReply):
            answer = self._asked.get(message.nonce)
            # Whoever asked may have given up in this moment.
            if answer is not None and answer.set_running_or_notify_cancel():
                answer.set_result(message.params)

    def _send(self, address: str, message: Message) -> None:
        try:
            self._control.send(address, encode(message))
        except KVFerryError as error:
            self.dropped += 1
            _log.warning("not sent to a side channel peer=%s: %s", address, error)
            return
        self.sent += 1
        self._last_used[address] = time.monotonic()

    def _forget_idle(self, now: float) -> None:
        for address in [
            address for address, used in self._last_used.items() if now - used >= _IDLE_CLOSE_S
        ]:
            self._control.forget(address)
            del self._last_used[address]
