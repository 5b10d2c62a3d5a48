"""The thread that runs a transfer worker.

The engine's thread submits commands and takes events. The two threads share nothing else.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.errors import KVFerryError, LocalProtocolError
from kvferry.events import (
    BytesMoved,
    Event,
    HandshakeFailed,
    MessageDropped,
    PeerConnected,
    PrefillCompleted,
    RetainedBlocksFetched,
)
from kvferry.transports.base import StreamEvent
from kvferry.worker.commands import WorkerCommand
from kvferry.worker.worker import TransferWorker, TransferWorkerSnapshot

MAX_QUEUED = 1_000_000
CLOSE_TIMEOUT_S = 10.0
MARK_INTERVAL_S = 0.001
"""How often the engine's stream is queried while commands wait for a mark.

In most cases the stream has already passed the mark.
"""
PROBE_AFTER_S = 1.0
"""An engine that sleeps while its transfers run is woken after this time, and so shows that it does
not hang.
"""

_log = logging.getLogger(__name__)

_STATS_ONLY_EVENTS = (
    BytesMoved,
    HandshakeFailed,
    RetainedBlocksFetched,
    MessageDropped,
    PeerConnected,
    PrefillCompleted,
)
"""Events that no request waits for, so the engine is not woken."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Commands of one `submit`, and the mark on the engine's stream that must be complete first."""

    commands: tuple[WorkerCommand, ...]
    mark: StreamEvent | None


class TransferWorkerThread:
    """Owns a transfer worker from `start` to `close`.

    `wake_worker` interrupts the worker's sleep and may be called from any thread.
    """

    def __init__(
        self,
        transfer_worker: TransferWorker,
        wake_worker: Callable[[], None],
        name: str = "kvferry",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transfer_worker = transfer_worker
        self._wake_worker = wake_worker
        self._wake_engine: Callable[[], None] = _no_wakeup
        # `append` and `popleft` of a deque are atomic, and each end is used by one thread, so no
        # lock is needed.
        self._inbox: deque[_Batch] = deque()
        self._outbox: deque[Event] = deque()
        self._num_submitted, self._num_taken = 0, 0
        """Numbers of commands. The engine's thread writes the first, this thread the second."""
        self._clock = clock
        self._engine_seen_at = clock()
        """When the engine's thread last submitted commands or took events: an engine does one or
        the other in every step.
        """
        self._is_closing = False
        self._failure: str | None = None
        self._snapshot = TransferWorkerSnapshot()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        """Set the function that this thread calls when there are events the engine waits for."""
        self._wake_engine = wake

    def submit(self, commands: Iterable[WorkerCommand], mark: StreamEvent | None = None) -> None:
        """Submit commands without waiting. KVFerryError if the transfer worker has died.

        Commands run in order, and not before the engine's stream has passed `mark`.
        """
        self._engine_seen_at = self._clock()
        if self._failure is not None:
            raise KVFerryError(f"the transfer worker has stopped: {self._failure}")
        batch = _Batch(tuple(commands), mark)
        if not batch.commands:
            return
        self._inbox.append(batch)
        self._num_submitted += len(batch.commands)
        if self._num_submitted - self._num_taken > MAX_QUEUED:
            raise LocalProtocolError(
                f"more than {MAX_QUEUED} commands wait for the transfer worker"
            )
        self._wake_worker()

    def take_events(self) -> list[Event]:
        """Take the events since the last call. KVFerryError if the transfer worker has died."""
        self._engine_seen_at = self._clock()
        if self._failure is not None:
            raise KVFerryError(f"the transfer worker has stopped: {self._failure}")
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    def snapshot(self) -> TransferWorkerSnapshot:
        """Return the worker's snapshot after its last tick."""
        return self._snapshot

    def close(self) -> None:
        """Stop the thread and close the transfer worker. Idempotent. KVFerryError as long as the
        thread runs: it may still use the cache.
        """
        if not self._is_closing:
            self._is_closing = True
            if self._thread.ident is None:
                self._transfer_worker.close()
                return
            self._wake_worker()
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            self._failure = f"it did not end within {CLOSE_TIMEOUT_S:g} s when asked to"
            raise KVFerryError(f"the transfer worker has not stopped: {self._failure}")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._tick()
        # Top of the thread: the engine must be notified, or requests would wait for ever.
        except Exception as error:
            _log.exception("transfer worker stopped because of a bug")
            self._failure = f"{type(error).__name__}: {error}"
            self._wake_engine()
        finally:
            self._transfer_worker.close()

    def _tick(self) -> None:
        commands = self._take_commands()
        # While a batch waits in the inbox, the mark of the batch is queried again after
        # MARK_INTERVAL_S.
        wait_s = min(MARK_INTERVAL_S, self._transfer_worker.idle_s()) if self._inbox else None
        events = self._transfer_worker.step(
            commands,
            wait_s=wait_s,
            late_commands=self._take_commands,
            engine_seen_at=self._engine_seen_at,
        )
        self._snapshot = self._transfer_worker.snapshot()
        if self._snapshot.transfers and self._clock() > self._engine_seen_at + PROBE_AFTER_S:
            self._wake_engine()
        if not events:
            return
        self._outbox.extend(events)
        if not all(isinstance(event, _STATS_ONLY_EVENTS) for event in events):
            self._wake_engine()

    def _take_commands(self) -> list[WorkerCommand]:
        """Take the batches whose mark is complete, in order: a batch never overtakes another."""
        commands: list[WorkerCommand] = []
        while self._inbox and (self._inbox[0].mark is None or self._inbox[0].mark.is_complete()):
            commands += self._inbox.popleft().commands
        self._num_taken += len(commands)
        return commands


def _no_wakeup() -> None:
    return None
