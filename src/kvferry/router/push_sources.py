"""Prefill instances that push, as their answers have shown them: what a push ticket for them says. Pure but for the random names.

An instance is asked alone at first, as in pull; its answer says how it hands over and where its side channel is. From then on both legs
start together. One that has failed may come back as another incarnation, so it is asked alone again.
"""

from dataclasses import dataclass, field
from uuid import uuid4

from kvferry.protocol.push_tickets import PushTicket, PushTicketKey
from kvferry.router.instances import Instance
from kvferry.router.legs import Handover, PushSource

__all__ = ["PushSources"]


@dataclass(slots=True)
class PushSources:
    key: PushTicketKey | None
    """None: without the cluster's secret nothing can be signed, and P is always asked first."""
    _known: dict[Instance, PushSource] = field(default_factory=dict, init=False)

    def learn(self, instance: Instance, handover: Handover | None) -> None:
        """What its latest answer says."""
        if handover is None or handover.push_source is None:
            self._known.pop(instance, None)
        else:
            self._known[instance] = handover.push_source

    def forget(self, instance: Instance) -> None:
        self._known.pop(instance, None)

    def push_handover_for(self, instance: Instance) -> Handover | None:
        """What the decode leg carries when both start together; None: ask this instance first."""
        source = self._known.get(instance)
        if source is None or self.key is None:
            return None
        address = source.side_channel
        ticket = PushTicket(uuid4().hex, source.engine, source.epoch, address.host, address.port, source.tp_size)
        return source.push_handover(self.key.sign(ticket))
