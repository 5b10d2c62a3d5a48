"""Embedded engines inside the test process: the real scheduler, ranks, connector, transfer workers
and transports; each rank is a thread instead of a process.

The tests of all cache forms need more engines than a small machine can run as processes.
"""

import queue
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvferry.config import ClusterSecret, KVTransferConfig, SideChannelConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.contract import KVConnectorBase_V1, KVConnectorRole, ParallelConfig
from kvferry.connectors.factory import KVConnectorFactory
from kvferry.engine.core import limits_of
from kvferry.engine.messages import AddRequest, RequestOutput, SamplingParams
from kvferry.engine.options import EngineOptions, EngineSetup
from kvferry.engine.runner import Worker, connector_config
from kvferry.engine.scheduler import Scheduler
from kvferry.engine.transfer_log import ConnectorTotals
from kvferry.transports.registry import ConfiguredTransportKit

SECRET = b"of the engines in this process"
DEADLINE_S = 60.0


class LocalEngine:
    def __init__(
        self,
        options: EngineOptions,
        name: str,
        extra: dict[str, Any] | None,
        meeting: Path,
        faults: str = "",
        policy: str = "fail",
    ) -> None:
        """`extra`: the connector's extra configuration; None for an engine without a connector.
        `faults`: the faults that its transports inject. `policy`: what happens if a load fails.
        """
        self.name = name
        self.finished: dict[str, RequestOutput] = {}
        self.tokens: dict[str, list[int]] = {}
        self._closing = ExitStack()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._totals = ConnectorTotals()
        transfer = None if extra is None else _transfer(name, extra, policy)
        setup = _setup(options, transfer, faults)
        size = options.tensor_parallel_size
        self._threads = [
            self._closing.enter_context(ThreadPoolExecutor(1, f"{name}-{rank}"))
            for rank in range(size)
        ]
        rendezvous = f"file://{meeting / secrets.token_hex(8)}"
        self._workers = [
            starting.result(DEADLINE_S)
            for starting in [
                thread.submit(
                    Worker.start, setup, ParallelConfig(size, rank), rendezvous, self._wake, _hear
                )
                for rank, thread in enumerate(self._threads)
            ]
        ]
        self._aggregator = KVOutputAggregator(size)
        self._connector = None if transfer is None else self._connect(setup)
        self._scheduler = Scheduler(limits_of(setup, self._workers[0]), self._connector)

    def add(
        self,
        request: str,
        prompt: Sequence[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
    ) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.tokens[request] = []
        refusal = self._scheduler.add(
            AddRequest(request, list(prompt), sampling, params, draw_seed=0)
        )
        if refusal is not None:
            self.finished[request] = refusal

    def abort(self, request: str) -> None:
        self._scheduler.abort(request)

    @property
    def kv_caches(self) -> Mapping[str, torch.Tensor]:
        """The cache of rank 0."""
        return self._workers[0].runner.kv_caches

    def step(self) -> None:
        """Run one engine step."""
        while not self._news.empty():
            self._news.get()
        plan = self._scheduler.schedule()
        running = [
            thread.submit(worker.execute, plan)
            for thread, worker in zip(self._threads, self._workers, strict=True)
        ]
        results = [each.result(DEADLINE_S) for each in running]
        result = results[0]
        if self._connector is not None:
            result.connector_output = self._aggregator.aggregate(
                [each.connector_output for each in results]
            )
            self._totals.add(result.connector_output.kv_connector_stats)
            self._totals.add(self._connector.get_kv_connector_stats())
        for output in self._scheduler.update(plan, result):
            self.tokens[output.request_id] += [token.token_id for token in output.tokens]
            if output.finish_reason is not None:
                self.finished[output.request_id] = output

    @property
    def num_loading(self) -> int:
        return self._scheduler.status(0).num_waiting_for_remote_kvs

    @property
    def num_used_blocks(self) -> int:
        return self._scheduler.status(0).num_used_blocks

    @property
    def stats(self) -> dict[str, Any]:
        return self._totals.to_dict()

    def close(self) -> None:
        if self._connector is not None:
            self._connector.shutdown()
        for thread, worker in zip(self._threads, self._workers, strict=True):
            thread.submit(worker.close).result(DEADLINE_S)
        self._closing.close()

    def _connect(self, setup: EngineSetup) -> KVConnectorBase_V1:
        worker = self._workers[0]
        config = connector_config(setup, worker.runner, ParallelConfig(len(self._workers), 0))
        connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, worker.kv_cache_config
        )
        connector.set_wakeup(self._wake)
        handshakes = {rank: each.handshake_metadata() for rank, each in enumerate(self._workers)}
        connector.set_xfer_handshake_metadata(
            {rank: data for rank, data in handshakes.items() if data is not None}
        )
        return connector

    def _wake(self) -> None:
        self._news.put(None)


def run_all(engines: Sequence[LocalEngine], is_done: Callable[[], bool]) -> None:
    """Step all engines until `is_done` returns True."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_done():
        for engine in engines:
            engine.step()
        assert time.monotonic() < deadline, "the engines did not get there in time"


def _transfer(name: str, extra: dict[str, Any], policy: str) -> KVTransferConfig:
    return KVTransferConfig.from_mapping(
        {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "engine_id": name,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra,
        }
    )


def _setup(options: EngineOptions, transfer: KVTransferConfig | None, faults: str) -> EngineSetup:
    side_channel = SideChannelConfig(port=0)
    environment = {"KVFERRY_FAULTS": faults} if faults else {}
    kit = ConfiguredTransportKit.from_settings(
        side_channel, ClusterSecret(SECRET, "the test", is_explicit=True), transfer, environment
    )
    return EngineSetup(
        replace(options, kv_transfer=transfer), kit, SECRET, side_channel if transfer else None
    )


def _hear(stage: str) -> None:
    return None
