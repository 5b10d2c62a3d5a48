"""What a consumer is told at the start, and what it says when one of its deadlines has passed. Plain data; pure."""

from dataclasses import dataclass

from kvferry.protocol.peers import PeerSettings
from kvferry.protocol.pulls import Transfer
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
    uses_host_buffer: bool = False
    """Transports bring blocks to a copy of the engine's memory, and they are copied from there."""
    offer_timeout_s: float = 480.0
    """How long a request with blocks waits for the producer to offer what it was registered for."""
    registration_s: float = 30.0
    """How long a producer remembers a registration without a heartbeat."""
    epoch: Epoch | None = None
    """Of this engine's life."""
    writable_transports: frozenset[str] = frozenset()
    """Transports by which a producer that pushes may write into our blocks."""
    fenced: frozenset[str] = frozenset()
    """Of our transports, those that can end that by themselves."""

    def overdue_reason(self, transfer: Transfer, now: float) -> str:
        is_coming = bool(transfer.arrival.ready) and transfer.arrival.read_until < transfer.to.tokens.stop
        match transfer.state:
            case TransferState.MOVING if is_coming and not transfer.outstanding.reads:
                return f"the prefill did not go on within {self.offer_timeout_s:g} s"
            case TransferState.MOVING if now < transfer.to.give_up_at:
                return f"the read did not end within {self.read_timeout_s:g} s"
            case TransferState.FILLING if transfer.arrival.ready:
                return f"the prefill did not go on within {self.offer_timeout_s:g} s"
            case TransferState.CONFIRMING if now < transfer.to.give_up_at:
                return f"the producer did not confirm the read within {self.confirm_timeout_s:g} s"
            case TransferState.WAITING | TransferState.FILLING if not transfer.is_offered:
                return f"the prefill side had nothing to hand over within {self.offer_timeout_s:g} s"
            case TransferState.TRACKED:
                return f"the producer did not answer within {self.confirm_timeout_s:g} s"
            case TransferState.READY:
                return f"the engine had no blocks for it within {self.confirm_timeout_s:g} s"
            case _:
                return f"the KV did not arrive within {self.receive_timeout_s:g} s"
