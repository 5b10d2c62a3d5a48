"""What the two halves of the pull connector say to each other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.connectors.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorWorkerMetadata
from kvferry.ferry.commands import Command
from kvferry.protocol.messages import Factor

__all__ = ["PullHandshakeMetadata", "PullMetadata", "PullNews"]


@dataclass(frozen=True, slots=True)
class PullMetadata(KVConnectorMetadata):
    """This step's commands to every rank's ferry, in order."""

    commands: tuple[Command, ...] = ()


@dataclass(slots=True)
class PullNews(KVConnectorWorkerMetadata):
    """What ranks have heard that decides what the scheduler does next."""

    promised: Counter[str] = field(default_factory=Counter)
    """Requests whose peer keeps for them what they may do without, and how many ranks say so."""
    refused: dict[str, str] = field(default_factory=dict)
    """Those that cannot have it, and why."""
    lingering: set[str] = field(default_factory=set)
    """Ended turns that were let go and are being read."""

    @property
    def is_empty(self) -> bool:
        return not (self.promised or self.refused or self.lingering)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PullNews":
        assert isinstance(other, PullNews)
        return PullNews(self.promised + other.promised, {**other.refused, **self.refused}, self.lingering | other.lingering)


@dataclass(frozen=True, slots=True)
class PullHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's encoded layout and what must be equal in a peer, served by the side channel as they are."""

    tp_rank: int
    layout: bytes
    factors: Mapping[str, Factor]
    epoch: str
    """The engine life the rank believes to be in."""
    is_staged: bool = False
    """Readers read a copy of granted blocks, so the rank must be told which blocks they are."""
