"""What a router is started with. Plain data, checked on construction; flags of `kvferry proxy` come from these fields."""

from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.router.instances import Instance

__all__ = ["RouterOptions"]


@dataclass(frozen=True, slots=True)
class RouterOptions:
    prefillers: tuple[Instance, ...]
    decoders: tuple[Instance, ...]
    host: str = "localhost"
    port: int = 8000
    """0: any free one."""
    connect_timeout_s: float = 5.0
    answer_timeout_s: float = 600.0
    """How long an instance may take over an answer that is not streamed: every prefill leg, and decode legs without `stream`."""
    idle_timeout_s: float = 300.0
    """How long a stream, an upload or a client that reads may stand still."""
    max_body_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port must be from 0 to 65535, got {self.port}")
        for name in ("connect_timeout_s", "answer_timeout_s", "idle_timeout_s", "max_body_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}")
