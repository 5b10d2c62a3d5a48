"""The thread that runs a worker: the transfer worker of a rank, or its offload worker.

The engine's thread submits commands and takes events. The two threads share nothing else.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry.errors import KVFerryError, LocalProtocolError
from kvferry.transports.base import StreamEvent

MAX_QUEUED = 1_000_000
CLOSE_TIMEOUT_S = 10.0
MARK_INTERVAL_S = 0.001
"""How often the engine's stream is queried while commands wait for a mark.

In most cases the stream has already passed the mark.
"""

Command = TypeVar("Command")
Event = TypeVar("Event")
Snapshot = TypeVar("Snapshot")
CommandIn = TypeVar("CommandIn", contravariant=True)
SnapshotOut = TypeVar("SnapshotOut", covariant=True)

_log = logging.getLogger(__name__)


class Worker(Protocol[CommandIn, Event, SnapshotOut]):
    """What a `WorkerThread` runs. Only the thread calls it, except for `waits_for_mark` and `wake`,
    which any thread may call.
    """

    @property
    def title(self) -> str:
        """What errors and log lines call the worker."""

    def waits_for_mark(self, command: CommandIn) -> bool:
        """Whether the command may not run before the engine's stream has passed its mark. Such
        commands stay in order; others may overtake them.
        """

    def step(
        self,
        commands: Sequence[CommandIn],
        *,
        wait_s: float | None,
        late_commands: Callable[[], Sequence[CommandIn]],
        engine_seen_at: float,
    ) -> Sequence[Event]:
        """Run one tick. Wait for input, unless there are commands, for at most `wait_s`, or
        `idle_s` if `wait_s` is None. `late_commands` is called after the wait.
        """

    def failed(self, error: Exception) -> Sequence[Event] | None:
        """Handle the failure of a tick. Returns the events for the engine if the worker goes on;
        None ends the thread, and with it the engine.
        """

    def idle_s(self) -> float:
        """How many seconds the worker may sleep if no input arrives."""

    def snapshot(self) -> SnapshotOut:
        """The state after the last step, for the engine's thread."""

    def wakes_engine(self, events: Sequence[Event], engine_seen_at: float) -> bool:
        """Whether to wake the engine after a step with these events."""

    def wake(self) -> None:
        """Interrupt the wait of `step`."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Batch(Generic[Command]):
    """Commands of one `submit`, and the mark on the engine's stream that must be complete first."""

    commands: Sequence[Command]
    mark: StreamEvent | None


class WorkerThread(Generic[Command, Event, Snapshot]):
    """Owns a worker from `start` to `close`."""

    def __init__(
        self,
        worker: Worker[Command, Event, Snapshot],
        name: str = "kvferry",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._wake_engine: Callable[[], None] = lambda: None
        # `append` and `popleft` of a deque are atomic, and each end is used by one thread, so no
        # lock is needed.
        self._inbox: deque[Command] = deque()
        self._held: deque[_Batch[Command]] = deque()
        """The commands that wait for a mark."""
        self._outbox: deque[Event] = deque()
        self._num_submitted, self._num_taken = 0, 0
        """Numbers of commands. The engine's thread writes the first, this thread the second."""
        self._clock = clock
        self._engine_seen_at = clock()
        """When the engine's thread last submitted commands or took events: an engine does one or
        the other in every step.
        """
        self._is_closing = False
        self._has_failed = False
        """A tick has failed. Marks are no longer queried: one of them may be the reason."""
        self._failure: str | None = None
        self._snapshot = worker.snapshot()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def set_wakeup(self, wake: Callable[[], None]) -> None:
        """Set the function that this thread calls when there are events the engine waits for."""
        self._wake_engine = wake

    def submit(self, commands: Iterable[Command], mark: StreamEvent | None = None) -> None:
        """Submit commands without waiting. KVFerryError if the worker has died.

        Commands that wait for marks run in order, and not before the engine's stream has passed
        `mark`.
        """
        self._check_alive()
        held: list[Command] = []
        others: list[Command] = []
        for command in commands:
            (held if self._worker.waits_for_mark(command) else others).append(command)
        if not held and not others:
            return
        # The others first, so that the thread never takes `held` without them.
        self._inbox.extend(others)
        if held:
            self._held.append(_Batch(held, mark))
        self._num_submitted += len(held) + len(others)
        if self._num_submitted - self._num_taken > MAX_QUEUED:
            raise LocalProtocolError(
                f"more than {MAX_QUEUED} commands wait for the {self._worker.title}"
            )
        self._worker.wake()

    def take_events(self) -> list[Event]:
        """Take the events since the last call. KVFerryError if the worker has died."""
        self._check_alive()
        return [self._outbox.popleft() for _ in range(len(self._outbox))]

    @property
    def has_events(self) -> bool:
        """Whether events wait for `take_events`."""
        return bool(self._outbox)

    def snapshot(self) -> Snapshot:
        """Return the worker's snapshot after its last tick."""
        return self._snapshot

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop the thread and close the worker. Idempotent. KVFerryError as long as the thread
        runs: it may still use the cache.
        """
        if not self._is_closing:
            self._is_closing = True
            if self._thread.ident is None:
                self._worker.close()
                return
            self._worker.wake()
        if self._thread.ident is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._failure = f"it did not end within {timeout_s:g} s when asked to"
            raise KVFerryError(f"the {self._worker.title} has not stopped: {self._failure}")

    def _check_alive(self) -> None:
        self._engine_seen_at = self._clock()
        if self._failure is not None:
            raise KVFerryError(f"the {self._worker.title} has stopped: {self._failure}")

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._tick()
        # Top of the thread: the engine must be notified, or requests would wait for ever.
        except Exception as error:
            _log.exception("the %s stopped because of a bug", self._worker.title)
            self._failure = f"{type(error).__name__}: {error}"
            self._wake_engine()
        finally:
            self._worker.close()

    def _tick(self) -> None:
        try:
            events = self._step()
        # A worker that goes on has lost its work, and answers for it.
        except Exception as error:
            answers = self._worker.failed(error)
            if answers is None:
                raise
            events, self._has_failed = answers, True
        # In this order: if the snapshot shows no more work, all events can be taken.
        self._outbox.extend(events)
        self._snapshot = self._worker.snapshot()
        if self._worker.wakes_engine(events, self._engine_seen_at):
            self._wake_engine()

    def _step(self) -> Sequence[Event]:
        commands = self._take_commands()
        # While a batch is held, its mark is queried again after MARK_INTERVAL_S.
        wait_s = min(MARK_INTERVAL_S, self._worker.idle_s()) if self._held else None
        return self._worker.step(
            commands,
            wait_s=wait_s,
            late_commands=self._take_commands,
            engine_seen_at=self._engine_seen_at,
        )

    def _take_commands(self) -> list[Command]:
        """Take the commands that wait for no mark, and the batches whose mark is complete, in
        order: a batch never overtakes another.
        """
        due: list[Command] = []
        while self._held and self._is_due(self._held[0].mark):
            due += self._held.popleft().commands
        commands = [self._inbox.popleft() for _ in range(len(self._inbox))] + due
        self._num_taken += len(commands)
        return commands

    def _is_due(self, mark: StreamEvent | None) -> bool:
        return mark is None or self._has_failed or mark.is_complete()
