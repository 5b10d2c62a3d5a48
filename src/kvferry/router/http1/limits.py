"""What a client may ask of the server's memory and patience. Pure."""

from dataclasses import dataclass

__all__ = ["ServerLimits"]


@dataclass(frozen=True, slots=True)
class ServerLimits:
    head_bytes: int = 32 * 1024
    """Of a request line with its header fields."""
    num_headers: int = 100
    body_bytes: int = 64 * 1024 * 1024
    num_connections: int = 10_000
    head_timeout_s: float = 10.0
    """From the first byte of a head to its last; also for a TLS handshake."""
    body_idle_timeout_s: float = 30.0
    """Between two segments of a body."""
    body_timeout_s: float = 300.0
    """For a whole body, so that one byte now and then does not hold a connection for ever."""
    keepalive_s: float = 75.0
    """How long a connection may wait for its next request, the first one included."""
    stall_timeout_s: float = 60.0
    """How long a client may read nothing while there is something for it."""
    linger_s: float = 2.0
    """How long what a refused client still sends is read and dropped: closing at once would destroy the answer on its way."""
