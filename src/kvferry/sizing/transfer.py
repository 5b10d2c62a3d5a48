"""The size of a prompt's KV, the time to transfer it over a link, and the settings that follow.
Pure.

There are two units. `ROUND` follows the usual tables of KV sizes: a KB has 1,024 bytes and larger
units count in thousands, so 1 GB is 1,000,000 KB, 1K tokens are 1,000, and a link of 200 Gbit/s
carries 25 such GB per second. `EXACT` has 1,000,000,000 bytes in a GB; its times are 2.4 % longer.
"""

import math
from dataclasses import dataclass
from enum import Enum

from kvferry.protocol.heartbeats import heartbeat_interval_s
from kvferry.sizing.shape import ModelCacheShape


class Units(Enum):
    """The number of bytes in a GB."""

    ROUND = 1_024_000_000
    EXACT = 1_000_000_000


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """A network link and its nominal speed."""

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
    """The KV of one prompt length."""

    tokens: int
    size_bytes: int
    """The bytes over all ranks, each head counted once."""
    rank_bytes: int
    """The bytes on the largest rank."""
    gigabytes: float
    """The size in the chosen units; `ms` uses the same units."""
    ms: tuple[float, ...]
    """The time over each link, if all bytes use one link."""


def prompt_row(
    shape: ModelCacheShape, tokens: int, links: tuple[NetworkLink, ...], tp: int, units: Units
) -> PromptRow:
    size = shape.prompt_bytes(tokens)
    gigabytes = size / units.value
    return PromptRow(
        tokens,
        size,
        shape.prompt_bytes(tokens, tp),
        gigabytes,
        tuple(1000 * gigabytes / link.gigabytes_per_s for link in links),
    )


def show_tokens(tokens: int) -> str:
    if tokens % 1_000_000 == 0:
        return f"{tokens // 1_000_000}M tokens"
    return f"{tokens // 1_000}K tokens" if tokens % 1_000 == 0 else f"{tokens:,} tokens"


def show_size(gigabytes: float) -> str:
    return f"{gigabytes:,.2f} GB" if gigabytes >= 0.1 else f"{gigabytes * 1000:.2f} MB"


def show_ms(ms: float) -> str:
    return f"~{ms:,.0f} ms" if ms >= 10 else f"~{ms:.1f} ms" if ms >= 0.1 else f"~{ms:.3f} ms"


# -- advice --
# The settings recommended for a model and its links, with the reason.


DEFAULT_LEASE_S = 30
DEFAULT_READ_TIMEOUT_S = 30
GOOD_SEGMENT_BYTES = 16 * 1024
"""From about this size on, the cost of a segment depends on its bytes, not on the number of
segments.
"""
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting, its value, and one sentence with the reason."""

    setting: str
    value: int
    reason: str


def advise_lease(longest_s: float, link: NetworkLink, held_bytes: int) -> Advice:
    """The lease duration. `longest_s` is the time of the longest prompt over the slowest link;
    `held_bytes` is the size of the prompt's blocks.
    """
    lease = max(DEFAULT_LEASE_S, math.ceil(2 * longest_s))
    interval = heartbeat_interval_s(lease)
    why = "the default is enough" if lease == DEFAULT_LEASE_S else "twice the longest read"
    return Advice(
        "kv_lease_duration",
        lease,
        f"{why}: the longest read takes {longest_s:.2g} s over {link.name}, and D renews the "
        f"lease every {interval:g} s (lease // 6) from the arrival of the request, also while the "
        f"request waits; if D dies, P holds the {held_bytes / 1e9:.2f} GB of such a prompt for up "
        f"to {lease} s",
    )


def advise_read_timeout(longest_s: float, link: NetworkLink) -> Advice:
    timeout = max(DEFAULT_READ_TIMEOUT_S, math.ceil(4 * longest_s))
    why = (
        "the default leaves room"
        if timeout == DEFAULT_READ_TIMEOUT_S
        else "four times the longest read"
    )
    return Advice(
        "read_timeout",
        timeout,
        f"{why}: {longest_s:.2g} s over {link.name} without other traffic, more with it",
    )


def advise_block_size(shape: ModelCacheShape, tp: int) -> Advice:
    """The smallest usual block size whose segments are large enough: small blocks waste less memory
    and share prefixes better.
    """
    token_bytes = min(shape.layer_bytes(group, tp) for group in shape.groups)
    size = next(
        (size for size in BLOCK_SIZES if size * token_bytes >= GOOD_SEGMENT_BYTES), BLOCK_SIZES[-1]
    )
    segment = size * token_bytes
    reason = (
        f"a layer's block is then one segment of {segment:,} bytes on each of {tp} "
        f"rank{'s' if tp > 1 else ''}"
    )
    if segment < GOOD_SEGMENT_BYTES:
        reason += (
            f"; that is below {GOOD_SEGMENT_BYTES:,}, so blocks that hold all layers "
            "(enable_cross_layers_blocks) help more"
        )
    elif size > BLOCK_SIZES[0]:
        reason += (
            f"; with {size // 2} it would be below {GOOD_SEGMENT_BYTES:,}, where each segment "
            "costs time whatever its size"
        )
    else:
        reason += (
            ", large enough that time goes with its bytes; larger blocks waste more memory in the "
            "last block and share fewer prefixes"
        )
    return Advice("block_size", size, reason)
