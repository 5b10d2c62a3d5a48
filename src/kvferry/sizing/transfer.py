"""How much of a prompt's KV crosses a link, and for how long. Pure.

Two ways to count. The usual table of KV sizes (`ROUND`) has 1,024 bytes in a KB and then goes on in thousands: 1 GB is 1,000,000 KB, 1K
tokens are 1,000, and a link of 200 Gbit/s carries 25 such GB per second. `EXACT` has 1,000,000,000 bytes in a GB; its times are 2.4 %
longer.
"""

from dataclasses import dataclass
from enum import Enum

from kvferry.sizing.shape import ModelCacheShape

__all__ = ["DEFAULT_LINKS", "DEFAULT_TOKENS", "NetworkLink", "PromptRow", "Units", "prompt_row", "show_ms", "show_size", "show_tokens"]


class Units(Enum):
    """Bytes of a GB, and of the KB it is made of."""

    ROUND = 1_024_000_000
    EXACT = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NetworkLink:
    name: str
    gbit: float

    @property
    def gigabytes_per_s(self) -> float:
        return self.gbit / 8

    @property
    def title(self) -> str:
        return f"{self.name} ({self.gbit:g} Gbps, ~{self.gigabytes_per_s:g} GB/s)"


DEFAULT_LINKS = (NetworkLink("IB HDR × 1", 200),)
DEFAULT_TOKENS = (1_000, 4_000, 8_000, 32_000, 128_000)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt length."""

    tokens: int
    size_bytes: int
    """Of all ranks, each head once."""
    rank_bytes: int
    """Of the largest rank."""
    gigabytes: float
    """In the units asked for; so are `ms`."""
    ms: tuple[float, ...]
    """For each link, all bytes over one."""


def prompt_row(shape: ModelCacheShape, tokens: int, links: tuple[NetworkLink, ...], tp: int, units: Units) -> PromptRow:
    size = shape.prompt_bytes(tokens)
    gigabytes = size / units.value
    return PromptRow(
        tokens, size, shape.prompt_bytes(tokens, tp), gigabytes, tuple(1000 * gigabytes / link.gigabytes_per_s for link in links)
    )


def show_tokens(tokens: int) -> str:
    if tokens % 1_000_000 == 0:
        return f"{tokens // 1_000_000}M tokens"
    return f"{tokens // 1_000}K tokens" if tokens % 1_000 == 0 else f"{tokens:,} tokens"


def show_size(gigabytes: float) -> str:
    return f"{gigabytes:,.2f} GB" if gigabytes >= 0.1 else f"{gigabytes * 1000:.2f} MB"


def show_ms(ms: float) -> str:
    return f"~{ms:,.0f} ms" if ms >= 10 else f"~{ms:.1f} ms" if ms >= 0.1 else f"~{ms:.3f} ms"
