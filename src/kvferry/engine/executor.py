"""Runs plans on all tensor-parallel ranks: rank 0 in this process, the others in their own.

One thread makes every call. A rank that dies, fails or stays silent is a TransportError that says which and how; the engine ends then.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import KVConnectorHandshakeMetadata, ParallelConfig
from kvferry.engine.rank import RankProcess
from kvferry.engine.setup import EngineSetup
from kvferry.engine.step import StepPlan, StepResult
from kvferry.engine.worker import Worker
from kvferry.errors import TransportError

__all__ = ["Executor"]

_FAILED_RANK_TIMEOUT_S = 2.0
"""How long to look for a dead rank when rank 0 fails: its peers notice a death before the operating system reports it."""


class Executor:
    """Build it with `start`; it owns rank 0 and the processes of the others until `close`."""

    def __init__(self, worker: Worker, ranks: list[RankProcess], handshakes: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._worker = worker
        self._ranks = ranks
        self._handshakes = handshakes
        self._aggregator = KVOutputAggregator(1 + len(ranks))

    @classmethod
    def start(cls, setup: EngineSetup, wake: Callable[[], None], report_stage: Callable[[str], None]) -> "Executor":
        """Start all ranks and wait until each has loaded its share."""
        tp_size = setup.options.tensor_parallel_size
        ranks: list[RankProcess] = []
        with _rendezvous_file() as rendezvous, contextlib.ExitStack() as undo:
            undo.callback(_kill_all, ranks)
            for rank in range(1, tp_size):
                report_stage(f"starting tensor-parallel rank {rank}")
                ranks.append(RankProcess.start(setup, ParallelConfig(tp_size, rank), rendezvous))
            with _naming_failed_rank(ranks):
                worker = Worker.start(setup, ParallelConfig(tp_size, 0), rendezvous, wake, report_stage)
            undo.callback(worker.close)
            handshakes = {0: worker.handshake_metadata()}
            for rank, process in enumerate(ranks, start=1):
                report_stage(f"waiting for tensor-parallel rank {rank}")
                ready = process.wait_ready(setup.rank_timeout_s)
                handshakes[rank] = ready.handshake
                if ready.num_blocks != worker.kv_cache_config.num_blocks:
                    raise TransportError(f"rank {rank} has {ready.num_blocks} blocks, rank 0 {worker.kv_cache_config.num_blocks}")
            undo.pop_all()
        return cls(worker, ranks, {rank: data for rank, data in handshakes.items() if data is not None})

    @property
    def worker(self) -> Worker:
        return self._worker

    @property
    def ranks(self) -> list[RankProcess]:
        """Ranks 1 and up; wait on them for notices while idle."""
        return self._ranks

    @property
    def handshakes(self) -> dict[int, KVConnectorHandshakeMetadata]:
        """What each rank's connector says of itself, by rank; those that say nothing are left out."""
        return self._handshakes

    def expect_reports(self, count: int) -> None:
        """How many ranks report each transfer, when that is not all of them. Before the first step."""
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
