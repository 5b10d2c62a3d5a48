"""The messages between the two roles of a connector, as vLLM carries them."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.connectors import contract
from kvferry.events import TransferTimes
from kvferry.vllm.identity.loaded_weights import WeightsSample


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The scheduler side's message of one step, wrapped for vLLM."""

    inner: contract.KVConnectorMetadata
    weights_sample: int | None = None
    """The number of the reset for which the workers sample their weights in this step."""


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """A rank's report to the scheduler side, wrapped for vLLM."""

    inner: contract.KVConnectorWorkerMetadata | None = None
    failed_loads: frozenset[str] = frozenset()
    """Optional loads that failed on this rank."""
    weights: WeightsSample | None = None
    times: dict[str, list[TransferTimes]] = field(default_factory=dict)
    """When the loads that have ended reached each stage; empty if vLLM writes no spans."""

    @property
    def is_empty(self) -> bool:
        return not (self.inner or self.failed_loads or self.weights or self.times)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMetadata":
        assert isinstance(other, WorkerMetadata)
        times = {
            request: [*self.times.get(request, ()), *other.times.get(request, ())]
            for request in self.times.keys() | other.times.keys()
        }
        return WorkerMetadata(
            _joined(self.inner, other.inner),
            self.failed_loads | other.failed_loads,
            _joined(self.weights, other.weights),
            times,
        )


def _joined(one: Any, other: Any) -> Any:
    return one.aggregate(other) if one is not None and other is not None else one or other


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """The handshake data of one rank's side, wrapped for vLLM."""

    inner: contract.KVConnectorHandshakeMetadata


@dataclass(slots=True)
class VllmOutput(contract.KVConnectorOutput):
    """The workers' report of one step, with vLLM's own object for the connectors of vLLM."""

    theirs: Any = None
