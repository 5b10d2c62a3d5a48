"""What a producer is told at the start. Plain data; pure."""

from dataclasses import dataclass

from kvferry.types import EngineId, Epoch

__all__ = ["ProducerSettings"]


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    engine: EngineId
    epoch: Epoch
    lease_ttl_s: float
    lease_extension_s: float
    grant_wait_s: float
    uses_host_buffer: bool = False
    peers: frozenset[str] = frozenset()
    """In push: side channels (host:port) of consumers that may register without a push ticket, by a prefill's request id."""
