"""What the consumer's ways to fill blocks work with: the pulls, the peers, and how to move a pull on. Plain data; pure."""

from dataclasses import dataclass
from typing import Protocol

from kvferry.events import Event
from kvferry.protocol.actions import Action
from kvferry.protocol.consumer_settings import ConsumerSettings
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.peers import PeerTable
from kvferry.protocol.pulls import Transfer, TransferTable
from kvferry.protocol.reader_talk import ProducerClient
from kvferry.protocol.transfers import TransferEvent

__all__ = ["ConsumerContext"]


class EventHandler(Protocol):
    def __call__(self, transfer: Transfer, event: TransferEvent, now: float, reason: str) -> None:
        """Move a pull on and do what its new state asks for."""


@dataclass(frozen=True, slots=True)
class ConsumerContext:
    settings: ConsumerSettings
    peers: PeerTable
    transfers: TransferTable
    client: ProducerClient
    actions: list[Action]
    events: list[Event]
    handle_event: EventHandler

    @property
    def geometry(self) -> Geometry:
        """Our own."""
        return self.settings.peers.geometry
