"""When loading KV from a storage tier beats computing it, and how many tokens a tier holds. Pure.

    loading    latency + bytes of the prompt / speed of the tier
    computing  tokens / prefill speed

Computing is counted as linear in the tokens. Attention makes long prompts slower than that, so the
real break-even is at fewer tokens, never at more.
"""

from dataclasses import dataclass

from kvferry.sizing.shape import ModelCacheShape

PAGE_BYTES = 4096
"""A row of the host pool fills whole pages, and an object on a disk or in a bucket has a header of
one page.
"""
MAX_TOKENS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TierSpeed:
    """How fast an engine loads from a tier, with all its ranks together."""

    name: str
    gigabytes_per_s: float
    """10^9 bytes per second."""
    latency_s: float = 0.0
    """From the lookup to the first byte."""
    is_given: bool = True
    """False for an assumption about a class of hardware."""

    @property
    def has_headers(self) -> bool:
        """Whether objects have headers: everywhere but in host memory."""
        return self.name != "cpu"


DEFAULT_TIERS = (
    TierSpeed("cpu", 25.0, 0.001, is_given=False),
    TierSpeed("disk", 5.0, 0.002, is_given=False),
    TierSpeed("object, 10 Gbit", 1.25, 0.05, is_given=False),
    TierSpeed("object, 25 Gbit", 3.125, 0.05, is_given=False),
    TierSpeed("object, 100 Gbit", 12.5, 0.05, is_given=False),
)
"""Assumptions: PCIe 4.0 x16 to a GPU, one NVMe disk, and S3 at the nominal speed of the link with
50 ms to the first byte. Measured speeds are better (`kvferry bench tiers`).
"""


@dataclass(frozen=True, slots=True)
class TierRow:
    """What one tier is worth for a model."""

    tier: TierSpeed
    tokens_held: int
    """The tokens whose KV fits into the planned size."""
    even_prefill: float
    """The prefill speed, in tokens per second, from which on loading is never faster."""
    from_tokens: int | None
    """The shortest prefix, in whole chunks, that is faster to load than to compute; None if none
    is, or if the prefill speed is not given.
    """


def tier_row(
    shape: ModelCacheShape,
    tier: TierSpeed,
    chunk_tokens: int,
    tp: int,
    size_bytes: int,
    prefill: float | None,
) -> TierRow:
    """`prefill` is the speed of computing in tokens per second; None if it is not known."""
    late_bytes = load_bytes(shape, MAX_TOKENS, tp) - load_bytes(shape, MAX_TOKENS - 1, tp)
    # With windows in all layers a long prompt costs no more bytes than a short one.
    even = tier.gigabytes_per_s * 1e9 / late_bytes if late_bytes else float("inf")
    return TierRow(
        tier,
        num_tokens_held(shape, tier, chunk_tokens, tp, size_bytes),
        even,
        None if prefill is None else break_even_tokens(shape, tier, chunk_tokens, tp, prefill),
    )


def break_even_tokens(
    shape: ModelCacheShape, tier: TierSpeed, chunk_tokens: int, tp: int, prefill: float
) -> int | None:
    """The fewest tokens, in whole chunks, that load faster than they are computed; None if
    computing is always faster.
    """

    def is_load_faster(chunks: int) -> bool:
        tokens = chunks * chunk_tokens
        return load_s(shape, tier, tokens, tp) < tokens / prefill

    # A prompt's bytes grow with its tokens, and more slowly once windows are full. So the advantage
    # of loading is convex and negative at 0: it changes sign at most once.
    low, high = 0, MAX_TOKENS // chunk_tokens
    if not is_load_faster(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_load_faster(middle) else (middle, high)
    return high * chunk_tokens


def load_s(shape: ModelCacheShape, tier: TierSpeed, tokens: int, tp: int) -> float:
    return tier.latency_s + load_bytes(shape, tokens, tp) / (tier.gigabytes_per_s * 1e9)


def load_bytes(shape: ModelCacheShape, tokens: int, tp: int) -> int:
    """The bytes that all ranks load. Heads that several ranks hold count several times."""
    return tp * shape.prompt_bytes(tokens, tp)


def num_tokens_held(
    shape: ModelCacheShape, tier: TierSpeed, chunk_tokens: int, tp: int, size_bytes: int
) -> int:
    """The tokens of whole chunks that fit into `size_bytes`, over all ranks. A chunk is one object
    for each rank and group of layers, also where a window has left it.
    """
    sizes = [chunk_tokens * group.layers * shape.layer_bytes(group, tp) for group in shape.groups]
    if tier.has_headers:
        chunk_bytes = sum(PAGE_BYTES + size for size in sizes)
    else:
        # All rows of the host pool have the size of the largest.
        chunk_bytes = len(sizes) * -(-max(sizes) // PAGE_BYTES) * PAGE_BYTES
    return size_bytes // (tp * chunk_bytes) * chunk_tokens
