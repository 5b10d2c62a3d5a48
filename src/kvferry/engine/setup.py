"""All that an engine's processes are started with: the options, the makers of transports and what identifies this life of the engine.

Picklable plain data; the core and every tensor-parallel rank get the same one.
"""

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.engine.options import EngineOptions
from kvferry.ports.kit import TransportKit

if TYPE_CHECKING:
    from kvferry.config import SideChannelConfig

__all__ = ["EngineSetup"]


@dataclass(frozen=True, slots=True)
class EngineSetup:
    options: EngineOptions
    kit: TransportKit
    secret: bytes = field(default=b"", repr=False)
    """The cluster secret; empty without a connector."""
    side_channel: "SideChannelConfig | None" = None
    epoch: str = field(default_factory=lambda: secrets.token_hex(8))
    """Made once per start, so one setup starts one engine."""
    log_level: int = 30
    """Of the processes' own logging; 30 is WARNING."""
    rank_timeout_s: float = 60.0
    """How long the core waits for a rank that should have answered."""
