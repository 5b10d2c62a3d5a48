"""A tensor-parallel rank in its own process: the code of the process and the core's handle on it.

    core -> rank   StepPlan | RankStop
    rank -> core   RankReady | RankFailed once, then one StepResult per plan,
                   and RankWakeup when the rank's connector has news between steps

Frames are pickles: both ends are one program on one machine, joined by a private socketpair. A rank
ends on `RankStop`, when the socket closes, or when the core dies (PR_SET_PDEATHSIG, for a rank that
is in the middle of a step).
"""

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from kvferry.connectors.contract import KVConnectorHandshakeMetadata, ParallelConfig
from kvferry.engine.ipc import FrameSocket
from kvferry.engine.messages import StepPlan, StepResult
from kvferry.engine.options import EngineSetup
from kvferry.errors import ConfigError, KVFerryError, TransportError
from kvferry.logs import configure_logs
from kvferry.sleep import Wakeup

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RankReady:
    """The rank has loaded its model and allocated its cache."""

    num_blocks: int
    handshake: KVConnectorHandshakeMetadata | None


@dataclass(frozen=True, slots=True)
class RankFailed:
    """The rank cannot start or go on; `is_config` is True when a setting is wrong."""

    reason: str
    is_config: bool


@dataclass(frozen=True, slots=True)
class RankWakeup:
    """The connector of this rank asks for a step."""


@dataclass(frozen=True, slots=True)
class RankStop:
    """The rank must end."""

    pass


class RankProcess:
    """The core's handle on one rank; one thread makes every call, and every wait has a deadline."""

    def __init__(
        self, rank: int, process: BaseProcess, link: FrameSocket, timeout_s: float
    ) -> None:
        self._rank = rank
        self._process = process
        self._link = link
        self._timeout_s = timeout_s
        self._arrived: deque[object] = deque()
        self._has_wakeup = False

    @classmethod
    def start(cls, setup: EngineSetup, parallel: ParallelConfig, rendezvous: str) -> "RankProcess":
        ours, theirs = socket.socketpair()
        with theirs:
            process = multiprocessing.get_context("spawn").Process(
                target=run_rank,
                args=(setup, parallel, rendezvous, theirs, os.getpid()),
                name=f"kvferry-rank-{parallel.tp_rank}",
            )
            process.start()
        return cls(
            parallel.tp_rank, process, FrameSocket(ours, setup.rank_timeout_s), setup.rank_timeout_s
        )

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def fileno(self) -> int:
        return self._link.fileno()

    def take_wakeup(self) -> bool:
        """True if the rank asked for a step since the last call.

        Raises TransportError when the rank is gone.
        """
        self._read()
        if not self._link.is_open:
            raise TransportError(self._exit_description())
        had, self._has_wakeup = self._has_wakeup, False
        return had

    def wait_ready(self, timeout_s: float) -> RankReady:
        match self._next(timeout_s):
            case RankReady() as ready:
                return ready
            case RankFailed(reason=reason, is_config=is_config):
                raise (ConfigError if is_config else TransportError)(
                    f"tensor-parallel rank {self._rank}: {reason}"
                )
            case other:
                raise TransportError(
                    f"tensor-parallel rank {self._rank} answered {type(other).__name__} before it "
                    "was ready"
                )

    def send(self, message: StepPlan | RankStop) -> None:
        try:
            self._link.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except TransportError as error:
            raise TransportError(f"{self._exit_description()} ({error})") from error

    def wait_result(self) -> StepResult:
        match self._next(self._timeout_s):
            case StepResult() as result:
                return result
            case RankFailed(reason=reason):
                raise TransportError(f"tensor-parallel rank {self._rank}: {reason}")
            case other:
                raise TransportError(
                    f"tensor-parallel rank {self._rank} answered a step with {type(other).__name__}"
                )

    def find_failure(self, timeout_s: float) -> str | None:
        """Return why the rank is gone or ends within `timeout_s`; None if the rank stays alive."""
        is_ending = bool(multiprocessing.connection.wait([self._process.sentinel], timeout_s))
        self._read()
        failed = next(
            (message for message in self._arrived if isinstance(message, RankFailed)), None
        )
        if failed is not None:
            return f"tensor-parallel rank {self._rank}: {failed.reason}"
        # A dying process closes its files, including the sentinel, a moment before `join` can
        # collect the exit code.
        return self._exit_description() if is_ending else None

    def ask_to_stop(self) -> None:
        if self._link.is_open:
            with contextlib.suppress(TransportError):
                self.send(RankStop())

    def kill(self) -> None:
        """Kill the process at once; `close` must still be called."""
        self._process.kill()

    def close(self) -> None:
        """Wait until the process is gone, or kill the process after a timeout; idempotent."""
        self._link.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            _log.warning("tensor-parallel rank %d did not stop, so it is killed", self._rank)
            self._process.kill()
            self._process.join(_STOP_TIMEOUT_S)

    def _next(self, timeout_s: float) -> object:
        deadline = time.monotonic() + timeout_s
        while not self._arrived:
            if not self._link.is_open:
                raise TransportError(self._exit_description())
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not multiprocessing.connection.wait([self._link.fileno()], left_s):
                raise TransportError(
                    f"tensor-parallel rank {self._rank} (pid {self.pid}) did not answer within "
                    f"{timeout_s:g} s"
                )
            self._read()
        return self._arrived.popleft()

    def _read(self) -> None:
        for frame in self._link.receive():
            message = pickle.loads(frame)
            if isinstance(message, RankWakeup):
                self._has_wakeup = True
            else:
                self._arrived.append(message)

    def _exit_description(self) -> str:
        self._process.join(1.0)
        code = self._process.exitcode
        how = (
            "closed its socket"
            if code is None
            else f"was killed by signal {-code}"
            if code < 0
            else f"exited with code {code}"
        )
        return f"tensor-parallel rank {self._rank} (pid {self.pid}) {how}"


def run_rank(
    setup: EngineSetup,
    parallel: ParallelConfig,
    rendezvous: str,
    sock: socket.socket,
    core_pid: int,
) -> None:
    """Run one rank; this is the main function of its process."""
    _die_with(core_pid)
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    configure_logs(setup.logs, f"rank{parallel.tp_rank}")
    link = FrameSocket(sock, setup.rank_timeout_s)
    wakeup = Wakeup()
    try:
        _serve(setup, parallel, rendezvous, link, wakeup)
    except Exception as error:  # top of the process: report to the core
        if isinstance(error, ConfigError):
            _log.debug("rank stops: %s", error)
        else:
            _log.exception("rank stops after an error")
        with contextlib.suppress(TransportError):
            _send(
                link,
                RankFailed(
                    str(error) if isinstance(error, KVFerryError) else repr(error),
                    isinstance(error, ConfigError),
                ),
            )
        raise SystemExit(1) from None
    finally:
        wakeup.close()
        link.close()
        gc.freeze()  # no search for cycles at exit, as in run_core


def _serve(
    setup: EngineSetup, parallel: ParallelConfig, rendezvous: str, link: FrameSocket, wakeup: Wakeup
) -> None:
    # Import here only: the core needs `RankProcess` before it has loaded a model.
    from kvferry.engine.runner import Worker

    worker = Worker.start(setup, parallel, rendezvous, wakeup.wake, _log.debug)
    try:
        _send(link, RankReady(worker.kv_cache_config.num_blocks, worker.handshake_metadata()))
        while link.is_open:
            multiprocessing.connection.wait([link.fileno(), wakeup.fileno()])
            if wakeup.clear():
                _send(link, RankWakeup())
            for frame in link.receive():
                plan = pickle.loads(frame)
                if not isinstance(plan, StepPlan):
                    return
                _send(link, worker.execute(plan))
    finally:
        worker.close()


def _send(link: FrameSocket, message: object) -> None:
    link.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _die_with(core_pid: int) -> None:
    # SIGKILL this rank when the core dies.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The core may have died before prctl; then no signal arrives.
    if os.getppid() != core_pid:
        raise SystemExit("the engine core has already exited")
