"""Shows a plan of `kvferry plan` as text and as JSON. Pure."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.sizing.segments import SegmentCount, Sides
from kvferry.sizing.shape import (
    DTYPE_BYTES,
    LATENT_DTYPE,
    LayerCacheKind,
    LayerGroup,
    ModelCacheShape,
)
from kvferry.sizing.tiers import TierRow
from kvferry.sizing.transfer import (
    Advice,
    NetworkLink,
    PromptRow,
    Units,
    show_ms,
    show_size,
    show_tokens,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """All computed values of a plan."""

    name: str
    shape: ModelCacheShape
    block_size: int
    tp: int
    links: tuple[NetworkLink, ...]
    rows: tuple[PromptRow, ...]
    segments: tuple[SegmentCount, ...]
    tiers: tuple[TierRow, ...]
    tier_gib: int
    prefill: float | None
    """Tokens per second; None if not given."""
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]


def plan_as_text(plan: Plan, units: Units) -> str:
    """Return the plan as text with tables."""
    shape = plan.shape
    per_token = shape.bytes_per_token()
    lines = [
        f"{plan.name}: {'; '.join(map(_describe, shape.groups))}; {shape.dtype}",
        f"Per token = {_formula(shape)} = {per_token:,} bytes ≈ {per_token / 1024:,.0f} KB",
        f"Per block of {plan.block_size} tokens = {per_token * plan.block_size:,} bytes",
    ]
    if plan.tp > 1:
        rank = shape.bytes_per_token(plan.tp)
        lines.append(
            f"On each of {plan.tp} ranks = {rank:,} bytes per token, {rank * plan.block_size:,} "
            "bytes per block"
        )
    head = ["Prompt Length", "KV Cache Size", *(link.title for link in plan.links)]
    body = [
        [show_tokens(row.tokens), show_size(row.gigabytes), *map(show_ms, row.ms)]
        for row in plan.rows
    ]
    rule = (
        "1K = 1,000 tokens, 1 KB = 1,024 bytes, 1 GB = 1,000,000 KB; --exact counts 1,000,000,000 "
        "bytes in a GB"
    )
    lines += [
        "",
        *_table(head, body),
        rule if units is Units.ROUND else "1 GB = 1,000,000,000 bytes",
    ]
    longest = max(row.tokens for row in plan.rows)
    head = ["P to D", *dict.fromkeys(count.layout for count in plan.segments)]
    lines += [
        "",
        f"Segments of one transfer of {show_tokens(longest)} into one rank, before adjacent "
        "blocks are joined (bytes of a segment):",
    ]
    lines += _table(head, _segment_rows(plan.segments))
    lines += ["", *_tier_lines(plan)]
    lines += [
        "",
        "Advice:",
        *(f"  {advice.setting} {advice.value}: {advice.reason}" for advice in plan.advice),
    ]
    return "\n".join([*lines, *(f"  note: {note}" for note in plan.notes)])


def _describe(group: LayerGroup) -> str:
    window = "" if group.window is None else f" of {group.window:,} tokens"
    if group.kind is LayerCacheKind.LATENT:
        return f"{group.layers} latent layers of {group.width} numbers"
    return (
        f"{group.layers} {group.kind} layers{window}, {group.kv_heads} KV heads of "
        f"{group.width // 2}"
    )


def _formula(shape: ModelCacheShape) -> str:
    """Return the product that gives the bytes per token, for the user to check."""
    parts = []
    for group in shape.groups:
        if group.fixed_bytes or shape.dtype == LATENT_DTYPE:
            parts.append(f"{group.layers} × {group.head_bytes(shape.dtype)}")
        elif group.kind is LayerCacheKind.LATENT:
            parts.append(f"{group.layers} × {group.width} × {DTYPE_BYTES[shape.dtype]}")
        elif group.width % 2 == 0:
            parts.append(
                f"{group.layers} × 2 × {group.kv_heads} × {group.width // 2} × "
                f"{DTYPE_BYTES[shape.dtype]}"
            )
        else:
            parts.append(
                f"{group.layers} × {group.kv_heads} × {group.width} × {DTYPE_BYTES[shape.dtype]}"
            )
    return " + ".join(parts)


def _segment_rows(segments: tuple[SegmentCount, ...]) -> list[list[str]]:
    rows: dict[Sides, list[str]] = {}
    for count in segments:
        rows.setdefault(count.sides, [count.sides.title]).append(
            f"{count.segments:,} ({count.segment_bytes:,})"
        )
    return list(rows.values())


def _tier_lines(plan: Plan) -> list[str]:
    if plan.prefill is None:
        title = "Loading from a tier beats computing while the engine computes fewer tokens/s than:"
        head = ["Tier", "Speed", "Tokens/s"]
    else:
        title = f"Loading from a tier beats computing at {plan.prefill:,.0f} tokens/s:"
        head = ["Tier", "Speed", "From"]
    body = []
    for row in plan.tiers:
        tier = row.tier
        speed = f"{tier.gigabytes_per_s:g} GB/s after {1000 * tier.latency_s:g} ms"
        if plan.prefill is None:
            worth = f"{row.even_prefill:,.0f}"
        else:
            worth = "never" if row.from_tokens is None else f"{row.from_tokens:,} tokens on"
        shown = speed if tier.is_given else f"{speed} (assumed)"
        body.append([tier.name, shown, worth, f"{row.tokens_held:,}"])
    advice = "" if plan.prefill is not None else "; --prefill shows from how many tokens on"
    return [
        title,
        *_table([*head, f"Tokens in {plan.tier_gib} GiB"], body),
        f"`kvferry bench tiers` measures the speeds, --tier sets them{advice}",
    ]


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *body]) for column in range(len(head))]
    lines = [
        " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        for row in [head, *body]
    ]
    return [
        f"| {line} |"
        for line in [lines[0], "-|-".join("-" * width for width in widths), *lines[1:]]
    ]


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a JSON object; `bytes_*` values are exact."""
    shape = plan.shape
    return {
        "model": plan.name,
        "dtype": shape.dtype,
        "layers": shape.layers,
        "groups": [
            {**asdict(group), "bytes_per_token": group.layers * shape.layer_bytes(group)}
            for group in shape.groups
        ],
        "bytes_per_token": shape.bytes_per_token(),
        "bytes_per_token_beyond_windows": shape.bytes_per_late_token(),
        "block_size": plan.block_size,
        "bytes_per_block": shape.bytes_per_token() * plan.block_size,
        "tp": plan.tp,
        "bytes_per_token_per_rank": shape.bytes_per_token(plan.tp),
        "bytes_per_block_per_rank": shape.bytes_per_token(plan.tp) * plan.block_size,
        "links": [asdict(link) for link in plan.links],
        "prompts": [_row_as_json(row, plan.links) for row in plan.rows],
        "segments": [
            {
                "layout": count.layout,
                **asdict(count.sides),
                "segments": count.segments,
                "segment_bytes": count.segment_bytes,
            }
            for count in plan.segments
        ],
        "tier_gib": plan.tier_gib,
        "prefill_tokens_per_s": plan.prefill,
        "tiers": [
            {
                **asdict(row.tier),
                "tokens_held": row.tokens_held,
                "even_prefill_tokens_per_s": row.even_prefill
                if math.isfinite(row.even_prefill)
                else None,
                "from_tokens": row.from_tokens,
            }
            for row in plan.tiers
        ],
        "advice": {
            advice.setting: {"value": advice.value, "reason": advice.reason}
            for advice in plan.advice
        },
        "notes": list(plan.notes),
    }


def _row_as_json(row: PromptRow, links: tuple[NetworkLink, ...]) -> dict[str, Any]:
    """Return one prompt length; `bytes` and `exact_ms` are exact, `gb` and `ms` are the table's
    values before rounding.
    """
    times = [
        {"link": link.name, "ms": ms, "exact_ms": row.size_bytes * 8 / (link.gbit * 1e6)}
        for link, ms in zip(links, row.ms, strict=True)
    ]
    return {
        "tokens": row.tokens,
        "bytes": row.size_bytes,
        "bytes_per_rank": row.rank_bytes,
        "gb": row.gigabytes,
        "times": times,
    }
