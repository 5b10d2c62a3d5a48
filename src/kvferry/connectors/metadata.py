"""What the two halves of the pull connector say to each other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.connectors.contract import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from kvferry.protocol.messages import Factor
from kvferry.worker.commands import WorkerCommand

__all__ = ["NixlConnectorMetadata", "NixlHandshakeMetadata", "NixlWorkerMetadata"]


@dataclass(frozen=True, slots=True)
class NixlConnectorMetadata(KVConnectorMetadata):
    """This step's commands to every rank's transfer worker, in order."""

    commands: tuple[WorkerCommand, ...] = ()


@dataclass(slots=True)
class NixlWorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks have heard that decides what the scheduler does next."""

    reserved: Counter[str] = field(default_factory=Counter)
    """Requests whose peer keeps for them what they may do without, and how many ranks say so."""
    refused: dict[str, str] = field(default_factory=dict)
    """Those that cannot have it, and why."""
    being_read: set[str] = field(default_factory=set)
    """Ended turns that were let go and are being read."""

    @property
    def is_empty(self) -> bool:
        return not (self.reserved or self.refused or self.being_read)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NixlWorkerMetadata":
        assert isinstance(other, NixlWorkerMetadata)
        return NixlWorkerMetadata(
            self.reserved + other.reserved,
            {**other.refused, **self.refused},
            self.being_read | other.being_read,
        )


@dataclass(frozen=True, slots=True)
class NixlHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's encoded layout and what must be equal in a peer, served by the side channel as
    they are.
    """

    tp_rank: int
    layout: bytes
    factors: Mapping[str, Factor]
    epoch: str
    """The engine incarnation the rank believes to be in."""
    uses_host_buffer: bool = False
    """Readers read a copy of granted blocks, so the rank must be told which blocks they are."""
