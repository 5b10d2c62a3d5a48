"""The side channel for stock decode sides: answers vLLM's own handshake on a thread of its own.

Exists only if `interop` is set. The answer is the same for every asker and contains nothing secret
but the addresses and keys of the KV cache, which stock peers need.
"""

import logging
import threading
import time
from typing import Protocol

import msgspec

from kvferry.errors import KVFerryError, RemoteProtocolError
from kvferry.logs import repeats_of
from kvferry.protocol.stock_dialect import decode_question
from kvferry.types import Address

POLL_S = 0.2
CLOSE_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class StockListening(Protocol):
    """The socket that stock decode sides ask."""

    address: Address

    def poll(self, timeout_s: float) -> tuple[bytes, bytes] | None: ...
    def reply(self, identity: bytes, *frames: bytes) -> None: ...
    def close(self) -> None: ...


class StockSideChannel:
    """Owns the listener from the constructor to `close`."""

    def __init__(self, listener: StockListening, payload: bytes) -> None:
        self._listener = listener
        self._payload = payload
        self._is_closing = False
        self._thread = threading.Thread(
            target=self._run, name="kvferry-stock-side-channel", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the socket. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise KVFerryError(
                f"the side channel for stock peers did not stop within {CLOSE_TIMEOUT_S:g} s"
            )

    def _run(self) -> None:
        try:
            while not self._is_closing:
                asked = self._listener.poll(POLL_S)
                if asked is not None:
                    self._answer(*asked)
        finally:
            self._listener.close()

    def _answer(self, identity: bytes, question: bytes) -> None:
        try:
            decode_question(question)
        except RemoteProtocolError as error:
            # A stock asker gives up after 5 s; there is no message for a refusal.
            _log.info(
                "side channel for stock peers dropped a message: %s", error, extra=repeats_of()
            )
            return
        # Stock peers measure the difference between our clock and theirs.
        clock = msgspec.msgpack.encode(time.perf_counter())
        self._listener.reply(identity, self._payload, clock)
