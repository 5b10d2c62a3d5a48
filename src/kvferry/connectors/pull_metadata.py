"""What the two halves of the pull connector say to each other."""

from dataclasses import dataclass

from kvferry.connectors.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
from kvferry.ferry.commands import Command

__all__ = ["PullHandshakeMetadata", "PullMetadata"]


@dataclass(frozen=True, slots=True)
class PullMetadata(KVConnectorMetadata):
    """This step's commands to every rank's ferry, in order."""

    commands: tuple[Command, ...] = ()


@dataclass(frozen=True, slots=True)
class PullHandshakeMetadata(KVConnectorHandshakeMetadata):
    """One rank's encoded layout, served by the side channel as it is."""

    tp_rank: int
    layout: bytes
