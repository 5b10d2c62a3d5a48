"""What the consumer's ways to fill blocks work with: the pulls, the peers, and how to move a pull on. Plain data; pure."""

from dataclasses import dataclass
from typing import Protocol

from kvferry.events import Event
from kvferry.protocol.actions import Action
from kvferry.protocol.consumer_settings import ConsumerSettings
from kvferry.protocol.geometry import Geometry
from kvferry.protocol.peers import PeerBook
from kvferry.protocol.pulls import Pull, PullTable
from kvferry.protocol.reader_talk import ReaderTalk
from kvferry.protocol.transfers import TransferEvent

__all__ = ["ConsumerParts"]


class Meet(Protocol):
    def __call__(self, pull: Pull, event: TransferEvent, now: float, reason: str) -> None:
        """Move a pull on and do what its new state asks for."""


@dataclass(frozen=True, slots=True)
class ConsumerParts:
    settings: ConsumerSettings
    peers: PeerBook
    pulls: PullTable
    talk: ReaderTalk
    actions: list[Action]
    events: list[Event]
    meet: Meet

    @property
    def geometry(self) -> Geometry:
        """Our own."""
        return self.settings.peers.geometry
