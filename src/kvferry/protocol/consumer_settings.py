"""What a consumer is told at the start, and what it says when one of its deadlines has passed. Plain data; pure."""

from dataclasses import dataclass

from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.pulls import Pull
from kvferry.protocol.transfers import TransferState
from kvferry.types import EngineId, Epoch

__all__ = ["ConsumerSettings"]


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    engine: EngineId
    peers: PeerSettings
    read_timeout_s: float
    confirm_timeout_s: float
    receive_timeout_s: float
    is_staged: bool = False
    """Planes bring blocks to a copy of the engine's memory, and they are copied from there."""
    offer_timeout_s: float = 480.0
    """How long a request with blocks waits for the producer to offer what it was registered for."""
    registration_s: float = 30.0
    """How long a producer remembers a registration without a heartbeat."""
    epoch: Epoch | None = None
    """Of this engine's life."""
    lends_by: frozenset[str] = frozenset()
    """Planes by which a producer that pushes may write into our blocks."""
    fenced: frozenset[str] = frozenset()
    """Of our planes, those that can end that by themselves."""

    def overdue_reason(self, pull: Pull, now: float) -> str:
        is_coming = bool(pull.arrival.ready) and pull.arrival.read_until < pull.to.tokens.stop
        match pull.state:
            case TransferState.MOVING if is_coming and not pull.outstanding.reads:
                return f"the prefill did not go on within {self.offer_timeout_s:g} s"
            case TransferState.MOVING if now < pull.to.give_up_at:
                return f"the read did not end within {self.read_timeout_s:g} s"
            case TransferState.FILLING if pull.arrival.ready:
                return f"the prefill did not go on within {self.offer_timeout_s:g} s"
            case TransferState.CONFIRMING if now < pull.to.give_up_at:
                return f"the producer did not confirm the read within {self.confirm_timeout_s:g} s"
            case TransferState.WAITING | TransferState.FILLING if not pull.is_offered:
                return f"the prefill side had nothing to hand over within {self.offer_timeout_s:g} s"
            case TransferState.TRACKED:
                return f"the producer did not answer within {self.confirm_timeout_s:g} s"
            case TransferState.READY:
                return f"the engine had no blocks for it within {self.confirm_timeout_s:g} s"
            case _:
                return f"the KV did not arrive within {self.receive_timeout_s:g} s"
