"""What to set for a model and its links, with the reason. Pure."""

import math
from dataclasses import dataclass

from kvferry.protocol.heartbeats import heartbeat_interval_s
from kvferry.sizing.shape import ModelCacheShape
from kvferry.sizing.transfer import NetworkLink

__all__ = ["GOOD_SEGMENT_BYTES", "Advice", "advise_block_size", "advise_lease", "advise_read_timeout"]

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
        f"{why}: the longest read takes {longest_s:.2g} s over {link.name}, and D renews the lease every {interval:g} s (lease // 6) from "
        f"the request's arrival on, also while it waits; when D dies, {held_bytes / 1e9:.2f} GB of such a prompt stay on P "
        f"for up to {lease} s",
    )


def advise_read_timeout(longest_s: float, link: NetworkLink) -> Advice:
    timeout = max(DEFAULT_READ_TIMEOUT_S, math.ceil(4 * longest_s))
    why = "the default leaves room" if timeout == DEFAULT_READ_TIMEOUT_S else "four times the longest read"
    return Advice("read_timeout", timeout, f"{why}: {longest_s:.2g} s over {link.name} when nobody else uses it, more when others do")


def advise_block_size(shape: ModelCacheShape, tp: int) -> Advice:
    """The smallest of the usual sizes whose segments are good, for small blocks waste less and share prefixes better."""
    token_bytes = min(shape.layer_bytes(group, tp) for group in shape.groups)
    size = next((size for size in BLOCK_SIZES if size * token_bytes >= GOOD_SEGMENT_BYTES), BLOCK_SIZES[-1])
    segment = size * token_bytes
    reason = f"a layer's block is then one segment of {segment:,} bytes on each of {tp} rank{'s' if tp > 1 else ''}"
    if segment < GOOD_SEGMENT_BYTES:
        reason += f"; that is below {GOOD_SEGMENT_BYTES:,}, so blocks that hold all layers (enable_cross_layers_blocks) help more"
    elif size > BLOCK_SIZES[0]:
        reason += f"; with {size // 2} it would be below {GOOD_SEGMENT_BYTES:,}, where segments cost by their number"
    else:
        reason += ", large enough to cost by its bytes; larger blocks waste more of the last one and share fewer prefixes"
    return Advice("block_size", size, reason)
