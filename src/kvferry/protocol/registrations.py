"""What a consumer tells a producer that has nothing for it yet: tell me when it is there, or never mind. Pure."""

from dataclasses import dataclass

from kvferry.protocol.messages import PushCancel, PushRegistration
from kvferry.protocol.pulls import Pull
from kvferry.types import EngineId

__all__ = ["Registrar"]


@dataclass(frozen=True, slots=True)
class Registrar:
    """Writes the messages of one rank of a consumer."""

    engine: EngineId
    tp_size: int
    lease_s: float

    def registration(self, pull: Pull) -> PushRegistration:
        invitation = pull.origin.invitation
        assert invitation is not None
        return PushRegistration(
            epoch=pull.life.epoch,
            reader=pull.reader,
            request_id=pull.request,
            decode_engine_id=self.engine,
            decode_host=invitation.own_address.host,
            decode_port=invitation.own_address.port,
            decode_tp_size=self.tp_size,
            lease_s=self.lease_s,
            handover=invitation.handover,
        )

    def cancellation(self, pull: Pull) -> PushCancel:
        invitation = pull.origin.invitation
        assert invitation is not None
        return PushCancel(pull.life.epoch, pull.reader, pull.request, self.engine, invitation.handover)
