"""How much of a prompt's KV crosses a link, and for how long. Pure.

Two ways to count. The usual table of KV sizes (`ROUND`) has 1,024 bytes in a KB and then goes on in
thousands: 1 GB is 1,000,000 KB, 1K tokens are 1,000, and a link of 200 Gbit/s carries 25 such GB
per second. `EXACT` has 1,000,000,000 bytes in a GB; its times are 2.4 % longer.
"""

import math
from dataclasses import dataclass
from enum import Enum

from kvferry.protocol.heartbeats import heartbeat_interval_s
from kvferry.sizing.shape import ModelCacheShape

__all__ = [
    "DEFAULT_LINKS",
    "DEFAULT_TOKENS",
    "GOOD_SEGMENT_BYTES",
    "Advice",
    "NetworkLink",
    "PromptRow",
    "Units",
    "advise_block_size",
    "advise_lease",
    "advise_read_timeout",
    "prompt_row",
    "show_ms",
    "show_size",
    "show_tokens",
]


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


# -------------------- advice --------------------
# What to set for a model and its links, with the reason. Pure.


DEFAULT_LEASE_S = 30
DEFAULT_READ_TIMEOUT_S = 30
GOOD_SEGMENT_BYTES = 16 * 1024
"""From about this size on, a segment costs by its bytes, not by its number."""
BLOCK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting, its value, and one sentence that says why."""

    setting: str
    value: int
    reason: str


def advise_lease(longest_s: float, link: NetworkLink, held_bytes: int) -> Advice:
    """`longest_s`: the longest prompt over the slowest link; `held_bytes`: its blocks."""
    lease = max(DEFAULT_LEASE_S, math.ceil(2 * longest_s))
    interval = heartbeat_interval_s(lease)
    why = "the default is enough" if lease == DEFAULT_LEASE_S else "twice the longest read"
    return Advice(
        "kv_lease_duration",
        lease,
        f"{why}: the longest read takes {longest_s:.2g} s over {link.name}, and D renews the "
        f"lease every {interval:g} s (lease // 6) from "
        f"the request's arrival on, also while it waits; when D dies, {held_bytes / 1e9:.2f} GB "
        "of such a prompt stay on P "
        f"for up to {lease} s",
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
        f"{why}: {longest_s:.2g} s over {link.name} when nobody else uses it, more when others do",
    )


def advise_block_size(shape: ModelCacheShape, tp: int) -> Advice:
    """The smallest of the usual sizes whose segments are good, for small blocks waste less and
    share prefixes better.
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
            f"; with {size // 2} it would be below {GOOD_SEGMENT_BYTES:,}, where segments cost by "
            "their number"
        )
    else:
        reason += (
            ", large enough to cost by its bytes; larger blocks waste more of the last one and "
            "share fewer prefixes"
        )
    return Advice("block_size", size, reason)
