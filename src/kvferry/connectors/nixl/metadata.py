"""The messages between the two sides of the pull and push connectors.
Plain data.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.connectors.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.protocol.messages import Factor
from kvferry.types import Epoch
from kvferry.worker.commands import WorkerCommand


@dataclass(frozen=True, slots=True)
class NixlConnectorMetadata(KVConnectorMetadata):
    """The commands of one step for the transfer worker of every rank, in order."""

    commands: tuple[WorkerCommand, ...] = ()
    optional_loads: frozenset[str] = frozenset()
    """The loads that start in this step and whose failure must not fail the request."""


@dataclass(slots=True)
class NixlWorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks report to the scheduler besides finished transfers. Reports of ranks are
    merged by `aggregate`.
    """

    reserved: Counter[str] = field(default_factory=Counter)
    """Requests with an optional load for which the retaining engine made a reservation, with the
    number of ranks that report the reservation.
    """
    refused: dict[str, str] = field(default_factory=dict)
    """Requests whose optional load the retaining engine refused, with the reason."""
    being_read: set[str] = field(default_factory=set)
    """Evicted turns that a peer is still reading."""
    failed: dict[str, str] = field(default_factory=dict)
    """Requests whose transfer failed, with the reason. Reported beside `failed_recving`, because
    vLLM passes on no reasons.
    """

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NixlWorkerMetadata":
        assert isinstance(other, NixlWorkerMetadata)
        return NixlWorkerMetadata(
            self.reserved + other.reserved,
            {**other.refused, **self.refused},
            self.being_read | other.being_read,
            {**other.failed, **self.failed},
        )


@dataclass(frozen=True, slots=True)
class NixlHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's encoded layout and the factors that must be equal in a peer. The side channel
    serves both unchanged.
    """

    tp_rank: int
    layout: bytes
    factors: Mapping[str, Factor]
    epoch: str
    """The rank's epoch; the scheduler checks that it equals the scheduler's own."""
    registration: int = 0
    """How often the rank has registered its cache again after a sleep."""
    uses_host_buffer: bool = False
    """Readers read a copy of the granted blocks in a host buffer, so a grant must name the blocks
    to copy.
    """


def registered_epoch(epoch: str, registration: int) -> Epoch:
    """The epoch under which peers know an engine that has registered its caches again after a
    sleep: for them the engine has restarted, so tickets and connections of before are void.
    """
    return Epoch(f"{epoch}.{registration}" if registration else epoch)
