"""What the two halves of the pull connector say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.connectors.contract import KVConnectorHandshakeMetadata, KVConnectorMetadata
from kvferry.ferry.commands import Command
from kvferry.protocol.messages import Factor

__all__ = ["PullHandshakeMetadata", "PullMetadata"]


@dataclass(frozen=True, slots=True)
class PullMetadata(KVConnectorMetadata):
    """This step's commands to every rank's ferry, in order."""

    commands: tuple[Command, ...] = ()


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
