"""Runs plans on all tensor-parallel ranks: rank 0 in this process, the others in their own.

One thread makes every call. A rank that dies, fails or stays silent is a TransportError that says
which and how; the engine ends then.
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from types import FrameType

import msgspec

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    ParallelConfig,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.ipc import FrameSocket, Wakeup
from kvferry.engine.limits import SchedulerLimits
from kvferry.engine.messages import (
    AbortRequest,
    AddRequest,
    CoreFailed,
    CoreProgress,
    CoreReady,
    Drain,
    FromCore,
    GetStatus,
    GetTransferRecords,
    Outputs,
    Remaining,
    RequestOutput,
    Shutdown,
    StepPlan,
    StepResult,
    ToCore,
    TransferRecordsReply,
)
from kvferry.engine.options import EngineSetup
from kvferry.engine.ranks import RankProcess
from kvferry.engine.runner import Worker, connector_config
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.transfer_log import ConnectorTotals
from kvferry.errors import ConfigError, KVFerryError, TransportError
from kvferry.types import FailurePolicy

__all__ = ["EngineCore", "Executor", "limits_of", "run_core"]


_FAILED_RANK_TIMEOUT_S = 2.0
"""How long to look for a dead rank when rank 0 fails: its peers notice a death before the operating
system reports it.
"""


class Executor:
    """Build it with `start`; it owns rank 0 and the processes of the others until `close`."""

    def __init__(
        self,
        worker: Worker,
        ranks: list[RankProcess],
        handshakes: dict[int, KVConnectorHandshakeMetadata],
    ) -> None:
        self._worker = worker
        self._ranks = ranks
        self._handshakes = handshakes
        self._aggregator = KVOutputAggregator(1 + len(ranks))

    @classmethod
    def start(
        cls, setup: EngineSetup, wake: Callable[[], None], report_stage: Callable[[str], None]
    ) -> "Executor":
        """Start all ranks and wait until each has loaded its share."""
        tp_size = setup.options.tensor_parallel_size
        ranks: list[RankProcess] = []
        with _rendezvous_file() as rendezvous, contextlib.ExitStack() as undo:
            undo.callback(_kill_all, ranks)
            for rank in range(1, tp_size):
                report_stage(f"starting tensor-parallel rank {rank}")
                ranks.append(RankProcess.start(setup, ParallelConfig(tp_size, rank), rendezvous))
            with _naming_failed_rank(ranks):
                worker = Worker.start(
                    setup, ParallelConfig(tp_size, 0), rendezvous, wake, report_stage
                )
            undo.callback(worker.close)
            handshakes = {0: worker.handshake_metadata()}
            for rank, process in enumerate(ranks, start=1):
                report_stage(f"waiting for tensor-parallel rank {rank}")
                ready = process.wait_ready(setup.rank_timeout_s)
                handshakes[rank] = ready.handshake
                if ready.num_blocks != worker.kv_cache_config.num_blocks:
                    raise TransportError(
                        f"rank {rank} has {ready.num_blocks} blocks, rank 0 "
                        f"{worker.kv_cache_config.num_blocks}"
                    )
            undo.pop_all()
        return cls(
            worker, ranks, {rank: data for rank, data in handshakes.items() if data is not None}
        )

    @property
    def worker(self) -> Worker:
        return self._worker

    @property
    def ranks(self) -> list[RankProcess]:
        """Ranks 1 and up; wait on them for notices while idle."""
        return self._ranks

    @property
    def handshakes(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """What each rank's connector says of itself, by rank; those that say nothing are left
        out.
        """
        return self._handshakes

    def expect_reports(self, count: int) -> None:
        """How many ranks report each transfer, when that is not all of them. Before the first
        step.
        """
        self._aggregator = KVOutputAggregator(count)

    def execute(self, plan: StepPlan) -> StepResult:
        """One step on every rank. TransportError when a rank is gone."""
        for rank in self._ranks:
            rank.send(plan)
        with _naming_failed_rank(self._ranks):
            result = self._worker.execute(plan)
        others = [rank.wait_result().connector_output for rank in self._ranks]
        if result.connector_output is not None:
            result.connector_output = self._aggregator.aggregate([result.connector_output, *others])
        return result

    def take_wakeups(self) -> bool:
        """Whether another rank's connector asked for a step. TransportError when a rank is gone."""
        return any([rank.take_wakeup() for rank in self._ranks])

    def close(self) -> None:
        """Stop every rank and wait until its process is gone. Idempotent."""
        for rank in self._ranks:
            rank.ask_to_stop()
        try:
            self._worker.close()
        finally:
            for rank in self._ranks:
                rank.close()


def _kill_all(ranks: list[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.close()


@contextlib.contextmanager
def _rendezvous_file() -> Iterator[str]:
    """A file without a name in any folder: however this process ends, nothing is left of it."""
    nameless = os.memfd_create("kvferry-ranks")
    try:
        yield f"file:///proc/{os.getpid()}/fd/{nameless}"
    finally:
        os.close(nameless)


@contextlib.contextmanager
def _naming_failed_rank(ranks: list[RankProcess]) -> Iterator[None]:
    """Rank 0 only sees a broken connection when another rank dies; say whose death it was."""
    try:
        yield
    except TransportError as error:
        for rank in ranks:
            failure = rank.find_failure(_FAILED_RANK_TIMEOUT_S)
            if failure is not None:
                raise TransportError(failure) from error
        raise


# -------------------- core -------------------- The engine core: a process whose main thread
# schedules, executes and updates, step by step, and talks to the API process between steps.
#
# With nothing to compute it sleeps until a message, a connector's wake-up or a rank's notice
# arrives. It ends when the API process closes the pipe, on `Shutdown`, or with the reason of a
# failure (`CoreFailed`, exit code 1 or 2), and takes its ranks with it. Signals are not for it:
# supervisors send them to every process of a service, and the API process may have promised to
# drain.


_log = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 0.01
"""How soon a connector that was unsure, or that cannot wake us, is asked again."""


class EngineCore:
    """Build it with `start`; it owns the executor and the scheduler's connector until `close`."""

    def __init__(
        self,
        api: "_ApiPipe",
        executor: Executor,
        connector: KVConnectorBase_V1 | None,
        limits: SchedulerLimits,
        wakeup: Wakeup,
    ) -> None:
        self._api = api
        self._executor = executor
        self._connector = connector
        self._scheduler = Scheduler(limits, connector)
        self._wakeup = wakeup
        self._totals = ConnectorTotals()
        self._is_stopping = False
        self._is_draining = False
        self._remaining: Remaining | None = None
        self._is_step_due = False
        self._has_slept = True
        self._must_poll = (
            connector is not None and type(connector).set_wakeup is KVConnectorBase_V1.set_wakeup
        )

    @classmethod
    def start(cls, setup: EngineSetup, api: "_ApiPipe", wakeup: Wakeup) -> "EngineCore":
        """Load everything and announce it. Called by the main thread of a process that is ours."""
        with contextlib.ExitStack() as undo:
            executor = Executor.start(setup, wakeup.wake, api.report_stage)
            undo.callback(executor.close)
            limits = limits_of(setup, executor.worker)
            connector = None
            if setup.options.kv_transfer is not None:
                api.report_stage("starting the connector")
                connector = _scheduler_connector(setup, executor, wakeup.wake, undo)
            core = cls(api, executor, connector, limits, wakeup)
            if connector is not None:
                connector.bind_kv_cache_manager(core._scheduler)
            # As SIGINT from here on, before anybody hears that we serve. So far it is how the API
            # process calls off a start that may be deep in a library.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            undo.pop_all()
        api.send(_ready_message(setup, limits))
        return core

    def run(self) -> None:
        while self._take_messages():
            if self._needs_step():
                self._step()
            else:
                self._sleep()

    def _step(self) -> None:
        self._is_step_due = self._has_slept = False
        plan = self._scheduler.schedule()
        if self._totals.transfer_log.is_watching:
            self._totals.transfer_log.note_plan(plan.slices, time.monotonic())
        result = self._executor.execute(plan)
        outputs = self._scheduler.update(plan, result)
        if result.connector_output is not None:
            self._totals.add(result.connector_output.kv_connector_stats)
            self._totals.transfer_log.note_receives(result.connector_output.recving_times)
        if self._connector is not None:
            self._totals.add(self._connector.get_kv_connector_stats())
        self._report(outputs)

    def _report(self, outputs: list[RequestOutput]) -> None:
        if self._totals.transfer_log.is_watching:
            self._totals.transfer_log.note_outputs(outputs, time.monotonic())
        if self._is_draining:
            # There will be no next turn here.
            self._scheduler.evict_retained()
            self._send_remaining()
        if outputs:
            self._api.send(Outputs(outputs))
        for note in self._scheduler.take_warnings():
            _log.warning("%s", note)

    def _needs_step(self) -> bool:
        # Called even when a step is due anyway: wake-ups are to be cleared and deaths to be noticed
        # between any two steps.
        was_woken, was_rank_woken = self._wakeup.clear(), self._executor.take_wakeups()
        # A connector that asks for a step again and again gets one per nap, not as many as fit into
        # a second.
        is_pushed = self._has_slept and self._scheduler.wants_push
        return (
            self._is_step_due
            or was_woken
            or was_rank_woken
            or is_pushed
            or self._scheduler.wants_step
        )

    def _sleep(self) -> None:
        must_poll_transfers = self._must_poll and self._scheduler.has_transfers
        needs_retry = (
            self._scheduler.is_lookup_pending or self._scheduler.wants_push or must_poll_transfers
        )
        timeout_s = _RETRY_INTERVAL_S if needs_retry else None
        ranks = [rank.fileno() for rank in self._executor.ranks]
        awake = connection.wait([self._api.fileno(), self._wakeup.fileno(), *ranks], timeout_s)
        self._is_step_due, self._has_slept = not awake, True

    # -- the API process --

    def _take_messages(self) -> bool:
        """Whether to go on."""
        outputs: list[RequestOutput] = []
        for message in self._api.receive():
            match message:
                case AddRequest():
                    self._totals.transfer_log.note_arrival(message, time.monotonic())
                    refusal = self._scheduler.add(message)
                    outputs += [] if refusal is None else [refusal]
                case AbortRequest(request_id=request_id):
                    self._totals.transfer_log.forget(request_id)
                    self._scheduler.abort(request_id)
                case GetStatus(nonce=nonce):
                    self._send_status(nonce)
                case GetTransferRecords(nonce=nonce, name=name):
                    self._api.send(
                        TransferRecordsReply(
                            nonce, self._totals.transfer_log.records(name, time.monotonic())
                        )
                    )
                case Drain():
                    self._is_draining = True
                case Shutdown():
                    self._is_stopping = True
        self._report(outputs)
        return self._api.is_open and not self._is_stopping

    def _send_status(self, nonce: int) -> None:
        status = self._scheduler.status(nonce)
        if self._connector is not None:
            self._totals.add(self._connector.get_kv_connector_stats())
        device = self._executor.worker.runner.device
        self._api.send(
            msgspec.structs.replace(
                status,
                transfers=self._totals.summaries(),
                connector_stats=self._totals.to_dict(),
                device_bytes=device.held_bytes,
                device_used_bytes=device.used_bytes,
            )
        )

    def _send_remaining(self) -> None:
        status = self._scheduler.status()
        num_requests = status.num_running + status.num_waiting + status.num_waiting_for_remote_kvs
        remaining = Remaining(num_requests, status.num_delayed_frees, status.num_used_blocks)
        if remaining != self._remaining:
            self._api.send(remaining)
            self._remaining = remaining

    def close(self) -> None:
        """Stop connector and ranks. Idempotent."""
        try:
            if self._connector is not None:
                self._connector.shutdown()
        finally:
            self._executor.close()


class _ApiPipe:
    """Typed messages over the socket to the API process."""

    def __init__(self, sock: FrameSocket) -> None:
        self._sock = sock
        self._decode = msgspec.msgpack.Decoder(ToCore).decode
        self._encode = msgspec.msgpack.Encoder().encode

    @property
    def is_open(self) -> bool:
        return self._sock.is_open

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> ToCore:
        return [message for frame in self._sock.receive() for message in self._decode(frame)]

    def send(self, message: FromCore) -> None:
        self._sock.send(self._encode(message))

    def report_stage(self, stage: str) -> None:
        _log.info("%s", stage)
        self.send(CoreProgress(stage))


def run_core(setup: EngineSetup, sock: socket.socket) -> None:
    """The main function of the core's process."""
    # Ctrl-C reaches the whole process group; the API process decides what it means and closes the
    # pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    logging.basicConfig(
        level=setup.log_level, format="%(asctime)s %(levelname)s core %(name)s: %(message)s"
    )
    link, wakeup = FrameSocket(sock), Wakeup()
    api = _ApiPipe(link)
    with contextlib.ExitStack() as closing:
        # Last of all: what is left goes with the process. Looking for cycles in all of torch takes
        # longer than everything else here.
        closing.callback(gc.freeze)
        closing.callback(link.close)
        closing.callback(wakeup.close)
        try:
            core = EngineCore.start(setup, api, wakeup)
            closing.callback(core.close)
            core.run()
        # the top of the process: everybody hears why it ends, before ranks are waited for
        except Exception as error:
            raise SystemExit(_report_failure(api, error)) from None


def _report_failure(api: _ApiPipe, error: Exception) -> int:
    """Report the end of the core; its exit code."""
    if not api.is_open:
        _log.warning("the API process is gone, and so is the engine core")
        return 1
    is_config = isinstance(error, ConfigError)
    if isinstance(error, KVFerryError):
        # The API process says a ConfigError to the operator, once.
        _log.log(logging.DEBUG if is_config else logging.ERROR, "the engine core ends: %s", error)
        reason = str(error)
    else:
        _log.exception("the engine core ends because of a bug")
        reason = (
            f"the engine core failed in an unexpected way ({type(error).__name__}: {error}); its "
            "log has the details"
        )
    with contextlib.suppress(TransportError):
        api.send(CoreFailed(reason, is_config))
    return 2 if is_config else 1


def _exit_on_signal(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def limits_of(setup: EngineSetup, worker: Worker) -> SchedulerLimits:
    """What the scheduler of an engine must respect, known once its first rank has its cache."""
    options, config = setup.options, worker.runner.config
    policy = (
        FailurePolicy.FAIL
        if options.kv_transfer is None
        else options.kv_transfer.kv_load_failure_policy
    )
    return SchedulerLimits(
        num_blocks=worker.kv_cache_config.num_blocks,
        block_size=worker.kv_cache_config.block_size,
        max_model_len=config.max_model_len(options.max_model_len),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        seed=options.seed,
        load_failure_policy=policy,
        groups=worker.kv_cache_config.groups,
    )


def _scheduler_connector(
    setup: EngineSetup, executor: Executor, wake: Callable[[], None], undo: contextlib.ExitStack
) -> KVConnectorBase_V1:
    worker = executor.worker
    config = connector_config(
        setup, worker.runner, ParallelConfig(setup.options.tensor_parallel_size, 0)
    )
    connector = KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, worker.kv_cache_config
    )
    undo.callback(connector.shutdown)
    connector.set_wakeup(wake)
    expected = connector.get_finished_count()
    if expected is not None:
        executor.expect_reports(expected)
    if executor.handshakes:
        connector.set_xfer_handshake_metadata(executor.handshakes)
    return connector


def _ready_message(setup: EngineSetup, limits: SchedulerLimits) -> CoreReady:
    transfer = setup.options.kv_transfer
    return CoreReady(
        max_model_len=limits.max_total_tokens,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        eos_token_ids=list(limits.eos_token_ids),
        vocab_size=limits.vocab_size,
        engine_id="" if transfer is None else str(transfer.engine_id or ""),
        epoch=setup.epoch,
    )
