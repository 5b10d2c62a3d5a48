"""The outbox of protocol code: actions for the transfer worker, events for the engine.

The producer and all its parts append to one outbox, and so do the consumer and its parts. So the
transfer worker performs their actions in the order in which the decisions were made. Pure.
"""

from dataclasses import dataclass, field

from kvferry.events import Event
from kvferry.protocol.actions import Action, Reply, ReplyMessage
from kvferry.types import Route


@dataclass(slots=True)
class Outbox:
    """Actions to perform and events to report, oldest first."""

    actions: list[Action] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def perform(self, action: Action) -> None:
        self.actions.append(action)

    def report(self, event: Event) -> None:
        self.events.append(event)

    def reply(self, route: Route, message: ReplyMessage) -> None:
        self.perform(Reply(route, message))

    def take_actions(self) -> list[Action]:
        # The lists are shared with the parts that append to them, so they are cleared in place.
        actions = list(self.actions)
        self.actions.clear()
        return actions

    def take_events(self) -> list[Event]:
        events = list(self.events)
        self.events.clear()
        return events
