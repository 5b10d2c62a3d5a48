"""The engine core: the process that schedules, executes and updates, step by step.

The main thread of the process makes every call. `Executor` runs each plan on all tensor-parallel
ranks: rank 0 in this process, every other rank in its own process. If a rank dies, fails or does
not answer, the executor raises a TransportError that names the rank and the cause, and the engine
ends.

Between steps the core exchanges messages with the API process. When no work is left, the core
sleeps until a message, a wake-up of the connector or a notice of a rank arrives. The core ends when
the API process closes the pipe, on `Shutdown`, or after a failure (`CoreFailed`, exit code 1 or 2),
and stops its ranks. Once ready, the core ignores signals: supervisors send signals to every process
of a service, but the API process may still be draining.
(docs/decisions/009-processes-of-an-engine.md)
"""

import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import connection
from typing import TYPE_CHECKING, NoReturn

import msgspec

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import (
    ConnectorDescription,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    ParallelConfig,
    SchedulerSide,
)
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.ipc import FrameSocket
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
from kvferry.engine.model.config import SamplingDefaults
from kvferry.engine.options import EngineSetup
from kvferry.engine.ranks import RankProcess
from kvferry.engine.runner import Worker, connector_config
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.transfer_log import ConnectorTotals
from kvferry.errors import ConfigError, KVFerryError, TransportError
from kvferry.logs import configure_logs
from kvferry.sleep import Wakeup
from kvferry.types import FailurePolicy

if TYPE_CHECKING:
    from kvferry.engine.tracing import EngineTracer

_FAILED_RANK_TIMEOUT_S = 2.0
"""How long to look for a dead rank when rank 0 fails.

The sockets of a dead rank break before the operating system reports the death of the process.
"""


class Executor:
    """Owns rank 0 and the processes of all other ranks, from `start` until `close`."""

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
        """Start all ranks and wait until every rank has loaded its shard of the model."""
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
                        f"rank {rank} has {ready.num_blocks} blocks, but rank 0 has "
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
        """Ranks 1 and up; the idle core waits on their file descriptors for notices."""
        return self._ranks

    @property
    def handshakes(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """Handshake metadata of each rank's connector, by rank, without ranks that have none."""
        return self._handshakes

    def expect_reports(self, count: int) -> None:
        """Set how many ranks report each transfer, if not all do; call before the first step."""
        self._aggregator = KVOutputAggregator(count)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step on every rank; raise TransportError when a rank is gone."""
        # Send the plan before rank 0 computes: the ranks wait for each other inside the forward
        # pass.
        for rank in self._ranks:
            rank.send(plan)
        with _naming_failed_rank(self._ranks):
            result = self._worker.execute(plan)
        others = [rank.wait_result().connector_output for rank in self._ranks]
        if result.connector_output is not None:
            result.connector_output = self._aggregator.aggregate([result.connector_output, *others])
        return result

    def take_wakeups(self) -> bool:
        """True if the connector of another rank asked for a step.

        Raises TransportError when a rank is gone.
        """
        # A list, not a generator: `any` must not stop before every rank is read.
        return any([rank.take_wakeup() for rank in self._ranks])

    def close(self) -> None:
        """Stop every rank and wait until its process is gone; idempotent."""
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
    """Yield the URL of an unlinked file, which disappears when this process ends."""
    nameless = os.memfd_create("kvferry-ranks")
    try:
        yield f"file:///proc/{os.getpid()}/fd/{nameless}"
    finally:
        os.close(nameless)


@contextlib.contextmanager
def _naming_failed_rank(ranks: list[RankProcess]) -> Iterator[None]:
    """Replace the broken connection that rank 0 sees by an error that names the rank that died."""
    try:
        yield
    except TransportError as error:
        for rank in ranks:
            failure = rank.find_failure(_FAILED_RANK_TIMEOUT_S)
            if failure is not None:
                raise TransportError(failure) from error
        raise


# -- core --
# The main loop of the process and its pipe to the API process.


_log = logging.getLogger(__name__)

_RETRY_INTERVAL_S = 0.01
"""How soon the core retries a connector whose lookup is pending or that cannot wake the core."""


class EngineCore:
    """Owns the executor and the connector's scheduler role, from `start` until `close`."""

    def __init__(
        self,
        api: "_ApiPipe",
        executor: Executor,
        connector: SchedulerSide | None,
        limits: SchedulerLimits,
        wakeup: Wakeup,
        tracer: "EngineTracer | None",
        must_poll: bool,
    ) -> None:
        self._api = api
        self._executor = executor
        self._connector = connector
        self._scheduler = Scheduler(limits, connector)
        self._wakeup = wakeup
        self._tracer = tracer
        self._totals = ConnectorTotals()
        self._is_stopping = False
        self._is_draining = False
        self._remaining: Remaining | None = None
        self._is_step_due = False
        self._has_slept = True
        self._must_poll = must_poll

    @classmethod
    def start(cls, setup: EngineSetup, api: "_ApiPipe", wakeup: Wakeup) -> "EngineCore":
        """Load everything and announce the engine; the main thread of the process calls this."""
        with contextlib.ExitStack() as undo:
            executor = Executor.start(setup, wakeup.wake, api.report_stage)
            undo.callback(executor.close)
            limits = limits_of(setup, executor.worker)
            connector, must_poll = None, False
            if setup.options.kv_transfer is not None:
                api.report_stage("starting the connector")
                description = KVConnectorFactory.describe_for(
                    setup.options.kv_transfer, executor.worker.kv_cache_config
                )
                connector = _make_scheduler_side(description, setup, executor, wakeup.wake, undo)
                if isinstance(connector, KVConnectorBase_V1):
                    # A connector of another author may decide these in its constructor.
                    description = replace(
                        description,
                        provides_dummy_kv=connector.provides_dummy_kv,
                        needs_polling=connector.needs_polling,
                    )
                limits, must_poll = _adapted(limits, description), description.needs_polling
            tracer = _make_tracer(setup)
            core = cls(api, executor, connector, limits, wakeup, tracer, must_poll)
            if connector is not None:
                connector.bind_kv_cache_manager(core._scheduler)
            # Ignore SIGTERM from here on, like SIGINT, before the API process learns that the core
            # is ready. Until here the API process uses SIGTERM to cancel a start that may be deep
            # inside a library.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            undo.pop_all()
        api.send(_ready_message(setup, limits, executor.worker.runner.config.sampling))
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
        if self._tracer is not None:
            self._tracer.note_loads(self._scheduler.begun_loads, time.monotonic())
        result = self._executor.execute(plan)
        outputs = self._scheduler.update(plan, result)
        if result.connector_output is not None:
            self._totals.add(result.connector_output.kv_connector_stats)
            self._totals.transfer_log.note_receives(result.connector_output.recving_times)
            if self._tracer is not None:
                self._tracer.note_connector_output(
                    result.connector_output,
                    self._totals.transfer_log.watched,
                    time.monotonic(),
                )
        if self._connector is not None:
            self._totals.add(self._connector.get_kv_connector_stats())
        self._report(outputs)

    def _report(self, outputs: list[RequestOutput]) -> None:
        now, log = time.monotonic(), self._totals.transfer_log
        received = log.note_outputs(outputs, now) if log.is_watching else []
        if self._tracer is not None:
            records = [log.record_of(request_id, now) for request_id in received]
            self._tracer.note_outputs(outputs, [record for record in records if record], now)
        if self._is_draining:
            # A draining engine serves no next turn.
            self._scheduler.evict_retained()
            self._send_remaining()
        if outputs:
            self._api.send(Outputs(outputs))
        for note in self._scheduler.take_warnings():
            _log.warning("%s", note)

    def _needs_step(self) -> bool:
        # Both calls are needed even when a step is due: the core must clear wake-ups and notice
        # dead ranks between any two steps.
        was_woken, was_rank_woken = self._wakeup.clear(), self._executor.take_wakeups()
        # A connector that asks for steps continuously gets one step per sleep, not as many as the
        # CPU can run.
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
        # A timeout means that the connector must be asked again, so run a step.
        self._is_step_due, self._has_slept = not awake, True

    # -- messages of the API process --

    def _take_messages(self) -> bool:
        """Handle all messages that have arrived; False when the core must stop."""
        outputs: list[RequestOutput] = []
        for message in self._api.receive():
            match message:
                case AddRequest():
                    now = time.monotonic()
                    self._totals.transfer_log.note_arrival(message, now)
                    if self._tracer is not None:
                        self._tracer.note_arrival(message, now)
                    refusal = self._scheduler.add(message)
                    outputs += [] if refusal is None else [refusal]
                case AbortRequest(request_id=request_id):
                    if self._tracer is not None:
                        now = time.monotonic()
                        record = self._totals.transfer_log.record_of(request_id, now)
                        self._tracer.note_abort(request_id, record, now)
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
        """Stop the connector and all ranks; idempotent."""
        try:
            if self._connector is not None:
                self._connector.shutdown()
        finally:
            self._executor.close()
            if self._tracer is not None:
                self._tracer.close()


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
    """Run the core; this is the main function of its process."""
    # Ctrl-C reaches the whole process group. The API process decides how to react, and closes the
    # pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    termination = _Termination()
    signal.signal(signal.SIGTERM, termination)
    configure_logs(setup.logs, "core")
    link, wakeup = FrameSocket(sock), Wakeup()
    api = _ApiPipe(link)
    with contextlib.ExitStack() as closing:
        # Registered first, so it runs last: gc.freeze stops the interpreter from searching all of
        # torch for cycles at exit, which takes longer than everything else here.
        closing.callback(gc.freeze)
        closing.callback(link.close)
        closing.callback(wakeup.close)
        try:
            core = EngineCore.start(setup, api, wakeup)
            closing.callback(core.close)
            core.run()
        # The top of the process: report the reason of the failure before waiting for the ranks.
        except Exception as error:
            # While torch converts an object, it turns the signal into an error of its own.
            if termination.signum:
                raise SystemExit(128 + termination.signum) from None
            raise SystemExit(_report_failure(api, error)) from None


def _report_failure(api: _ApiPipe, error: Exception) -> int:
    """Report the failure to the API process and return the exit code."""
    if not api.is_open:
        _log.warning("the API process is gone, so the engine core stops")
        return 1
    is_config = isinstance(error, ConfigError)
    if isinstance(error, KVFerryError):
        # The API process reports a ConfigError to the operator, so log only at DEBUG level here.
        _log.log(logging.DEBUG if is_config else logging.ERROR, "engine core stops: %s", error)
        reason = str(error)
    else:
        _log.exception("engine core stops because of a bug")
        reason = (
            f"the engine core failed unexpectedly ({type(error).__name__}: {error}); its log has "
            "the details"
        )
    with contextlib.suppress(TransportError):
        api.send(CoreFailed(reason, is_config))
    return 2 if is_config else 1


class _Termination:
    """Handles the signal that ends the process."""

    def __init__(self) -> None:
        self.signum = 0
        """0 until the signal arrives."""

    def __call__(self, signum: int, frame: object) -> NoReturn:
        self.signum = signum
        raise SystemExit(128 + signum)


def limits_of(setup: EngineSetup, worker: Worker) -> SchedulerLimits:
    """Return the limits of the scheduler; they are known once rank 0 has allocated its cache."""
    options, config = setup.options, worker.runner.config
    transfer = options.kv_transfer
    policy = FailurePolicy.FAIL if transfer is None else transfer.kv_load_failure_policy
    has_states = worker.kv_cache_config.has_states
    if has_states and options.enable_prefix_caching:
        _log.info("prefix caching is off, because the model has states")
    return SchedulerLimits(
        num_blocks=worker.kv_cache_config.num_blocks,
        block_size=worker.kv_cache_config.block_size,
        max_model_len=config.max_model_len(options.max_model_len),
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        # The cached blocks of a prefix are of no use without the states after the prefix.
        enable_prefix_caching=options.enable_prefix_caching and not has_states,
        enable_chunked_prefill=options.enable_chunked_prefill,
        seed=options.seed,
        load_failure_policy=policy,
        groups=worker.kv_cache_config.groups,
        serves_peers=transfer is not None and transfer.is_kv_producer,
    )


def _make_tracer(setup: EngineSetup) -> "EngineTracer | None":
    options = setup.options
    if not options.otlp_traces_endpoint:
        return None
    # Imported here, because the packages belong to the extra [tracing].
    from kvferry.engine.tracing import EngineTracer
    from kvferry.tracing.exporter import TraceExporter

    transfer = options.kv_transfer
    engine_id = "" if transfer is None else str(transfer.engine_id or "")
    attributes = {
        "service.instance.id": engine_id or setup.epoch,
        "gen_ai.request.model": options.served_model_name,
    }
    return EngineTracer(TraceExporter(options.otlp_traces_endpoint, "kvferry-engine", attributes))


def _adapted(limits: SchedulerLimits, description: ConnectorDescription) -> SchedulerLimits:
    """The limits of an engine with this connector."""
    if description.provides_dummy_kv and limits.enable_prefix_caching:
        _log.info("prefix caching is off, because the connector makes up KV")
        limits = replace(limits, enable_prefix_caching=False)
    if description.loads_are_optional:
        limits = replace(limits, load_failure_policy=FailurePolicy.RECOMPUTE)
    return limits


def _make_scheduler_side(
    description: ConnectorDescription,
    setup: EngineSetup,
    executor: Executor,
    wake: Callable[[], None],
    undo: contextlib.ExitStack,
) -> SchedulerSide:
    worker = executor.worker
    config = connector_config(
        setup, worker.runner, ParallelConfig(setup.options.tensor_parallel_size, 0)
    )
    connector = description.make_scheduler(config, worker.kv_cache_config)
    undo.callback(connector.shutdown)
    connector.set_wakeup(wake)
    if isinstance(connector, KVConnectorBase_V1) and (count := connector.get_finished_count()):
        executor.expect_reports(count)
    if executor.handshakes:
        connector.set_xfer_handshake_metadata(executor.handshakes)
    return connector


def _ready_message(
    setup: EngineSetup, limits: SchedulerLimits, sampling: SamplingDefaults
) -> CoreReady:
    transfer = setup.options.kv_transfer
    return CoreReady(
        max_model_len=limits.max_total_tokens,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        eos_token_ids=list(limits.eos_token_ids),
        vocab_size=limits.vocab_size,
        engine_id="" if transfer is None else str(transfer.engine_id or ""),
        epoch=setup.epoch,
        samples_first_tokens=not limits.has_states,
        sampling=sampling,
    )
