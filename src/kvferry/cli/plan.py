"""`kvferry plan` computes the size of a model's KV cache, the time to move the cache, and settings.

Reads only config.json and loads no weights. `make_plan` computes a `Plan`; the pure functions
`plan_as_text` and `plan_as_json` show the plan.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.cli.arguments import Parser
from kvferry.config import find_checkpoint
from kvferry.config.fields import shown
from kvferry.errors import ConfigError
from kvferry.protocol.layout import can_divide
from kvferry.sizing.hf_config import MAX_HEADS, MAX_LAYERS, auto_dtype, shape_of_config
from kvferry.sizing.segments import CROSS_LAYER, LAYOUTS, SegmentCount, Sides, count_segments
from kvferry.sizing.shape import (
    DTYPE_BYTES,
    LATENT_DTYPE,
    LayerCacheKind,
    LayerGroup,
    ModelCacheShape,
    canonical_dtype,
)
from kvferry.sizing.transfer import (
    DEFAULT_LINKS,
    DEFAULT_TOKENS,
    Advice,
    NetworkLink,
    PromptRow,
    Units,
    advise_block_size,
    advise_lease,
    advise_read_timeout,
    prompt_row,
    show_ms,
    show_size,
    show_tokens,
)

__all__ = [
    "DESCRIPTION",
    "EXAMPLES",
    "Plan",
    "add_arguments",
    "make_plan",
    "parse_link",
    "parse_tokens",
    "plan_as_json",
    "plan_as_text",
    "run",
]


# -- output --


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


# -- command --


DESCRIPTION = (
    "Compute how large a model's KV cache is, how long a prompt's KV takes over a link, how many "
    "segments that makes, and what to set."
)
EXAMPLES = """\
  kvferry plan /models/tiny
  kvferry plan --layers 80 --kv-heads 8 --head-dim 128 --dtype bfloat16
  kvferry plan /models/tiny/config.json --tp 2 --link 'Ethernet=100' --link 'IB NDR=400' --tokens 2K --tokens 100000
  kvferry plan /models/tiny --json | jq .bytes_per_token"""  # noqa: E501

MAX_CONFIG_BYTES = 16 * 2**20
TOKENS = re.compile(r"([0-9]{1,18})([kKmM]?)")
FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}
MAX_TOKENS = 1_000_000_000
MAX_TP = 1_024
MAX_BLOCK_SIZE = 8_192
MAX_BLOCK_RATIO = 256
MAX_HEAD_DIM = 65_536
MIN_GBIT = 1e-6
FLAG_WIDTHS = ("--layers", "--kv-heads", "--head-dim")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder of a checkpoint, its config.json, or owner/name in the Hugging Face cache",
    )
    parser.add_argument(
        "--layers",
        type=count_to(MAX_LAYERS),
        metavar="N",
        help="number of layers, instead of MODEL; with --kv-heads and --head-dim",
    )
    parser.add_argument(
        "--kv-heads",
        type=count_to(MAX_HEADS),
        metavar="N",
        help="KV heads per layer, instead of MODEL",
    )
    parser.add_argument(
        "--head-dim",
        type=count_to(MAX_HEAD_DIM),
        metavar="N",
        help="numbers per head, instead of MODEL",
    )
    dtypes = ", ".join([*DTYPE_BYTES, LATENT_DTYPE])
    parser.add_argument(
        "--dtype",
        default="auto",
        help=f"dtype of the cache: {dtypes} (default: the dtype of MODEL, else bfloat16)",
    )
    parser.add_argument(
        "--block-size",
        type=count_to(MAX_BLOCK_SIZE),
        default=16,
        metavar="N",
        help="tokens per block (default: %(default)s)",
    )
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=count_to(MAX_TP),
        default=1,
        metavar="N",
        help="tensor-parallel ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--peer-tp",
        type=count_to(MAX_TP),
        metavar="N",
        help="ranks of the other side, for the segments (default: twice --tp)",
    )
    parser.add_argument(
        "--peer-block-size",
        type=count_to(MAX_BLOCK_SIZE),
        metavar="N",
        help="block size of the other side, for the segments (default: twice --block-size)",
    )
    parser.add_argument(
        "--link",
        type=parse_link,
        action="append",
        metavar="NAME=GBIT",
        help="a link and its Gbit/s; may be repeated (default: IB HDR × 1=200)",
    )
    parser.add_argument(
        "--tokens",
        type=parse_tokens,
        action="append",
        metavar="N",
        help="a prompt length; 1K is 1,000 (default: 1K 4K 8K 32K 128K)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="count 1 GB as 1,000,000,000 bytes everywhere, also for the times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    plan = make_plan(arguments)
    units = Units.EXACT if arguments.exact else Units.ROUND
    print(json.dumps(plan_as_json(plan), indent=2) if arguments.json else plan_as_text(plan, units))
    return 0


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Compute the plan; ConfigError names an argument that is missing or does not fit."""
    name, shape, notes = _shape(arguments)
    tp, block = arguments.tp, arguments.block_size
    shape.check_tp(tp)
    links = tuple(arguments.link or DEFAULT_LINKS)
    units = Units.EXACT if arguments.exact else Units.ROUND
    rows = tuple(
        prompt_row(shape, tokens, links, tp, units) for tokens in arguments.tokens or DEFAULT_TOKENS
    )
    longest, slowest = max(rows, key=lambda row: row.tokens), min(links, key=lambda link: link.gbit)
    longest_s = longest.size_bytes * 8 / (slowest.gbit * 1e9)
    segments = [
        count_segments(shape, layout, sides, longest.tokens)
        for sides in _sides(arguments, shape)
        for layout in _layouts(shape)
    ]
    advice = (
        advise_lease(longest_s, slowest, longest.size_bytes),
        advise_read_timeout(longest_s, slowest),
        advise_block_size(shape, tp),
    )
    return Plan(
        name,
        shape,
        block,
        tp,
        links,
        rows,
        tuple(segments),
        advice,
        tuple([*notes, *_notes(shape, tp)]),
    )


def count_to(most: int) -> Callable[[str], int]:
    """For argparse: return a parser for whole numbers from 1 to `most`."""

    def parse_count(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least 1, got {text[:80]!a}"
            )
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:,}, got {text[:80]!a}")
        return int(text)

    return parse_count


def parse_tokens(text: str) -> int:
    """For argparse: parse a prompt length; here K means 1,000, as is usual for prompts."""
    match = TOKENS.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} is not a prompt length; write it like 4000 or 4K"
        )
    tokens = int(match[1]) * FACTORS[match[2].lower()]
    if tokens > MAX_TOKENS:
        raise argparse.ArgumentTypeError(
            f"a prompt of {text[:80]!a} is too long to plan; the limit is "
            f"{MAX_TOKENS // FACTORS['m']:,}M"
        )
    return tokens


def parse_link(text: str) -> NetworkLink:
    """For argparse: parse a link given as NAME=GBIT."""
    name, _, speed = text.rpartition("=")
    try:
        gbit = float(speed)
    except ValueError:
        gbit = math.nan
    if not name.strip() or not name.isprintable() or not MIN_GBIT <= gbit < 1e9:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} is not a link; write it like 'Ethernet=100', a name and its Gbit/s"
        )
    return NetworkLink(name.strip(), gbit)


def _shape(arguments: argparse.Namespace) -> tuple[str, ModelCacheShape, list[str]]:
    """Return name, cache shape and notes of the model, from MODEL or from the size flags."""
    given = [
        value
        for value in (arguments.layers, arguments.kv_heads, arguments.head_dim)
        if value is not None
    ]
    if arguments.model is not None and given:
        raise ConfigError(
            f"MODEL and {', '.join(FLAG_WIDTHS)} both describe a model; give one or the other"
        )
    if arguments.model is not None:
        return _shape_of_model(arguments.model, arguments.dtype)
    if len(given) < len(FLAG_WIDTHS):
        raise ConfigError(
            f"MODEL is missing; name a folder or a config.json, or give {', '.join(FLAG_WIDTHS)}"
        )
    dtype = canonical_dtype("bfloat16" if arguments.dtype == "auto" else arguments.dtype)
    group = LayerGroup(
        LayerCacheKind.FULL, arguments.layers, arguments.kv_heads, 2 * arguments.head_dim
    )
    return "a model of these sizes", ModelCacheShape((group,), dtype), []


def _shape_of_model(model: str, requested_dtype: str) -> tuple[str, ModelCacheShape, list[str]]:
    path = Path(model)
    path = path if path.is_file() else find_checkpoint(model, os.environ) / "config.json"
    config = _read(path)
    config_dtype = auto_dtype(config) if requested_dtype == "auto" else None
    notes = (
        ["config.json does not name a dtype; bfloat16 is assumed, --dtype sets another"]
        if requested_dtype == "auto" and not config_dtype
        else []
    )
    return (
        model,
        shape_of_config(
            config,
            config_dtype
            or canonical_dtype("bfloat16" if requested_dtype == "auto" else requested_dtype),
        ),
        notes,
    )


def _read(path: Path) -> dict[str, Any]:
    """Read config.json; raise ConfigError if the file is unreadable or not a JSON object."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except OSError as error:
        raise ConfigError(
            f"{shown(str(path))} cannot be read: {error.strerror}; name a model's config.json"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{shown(str(path))} is not JSON; name a model's config.json") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{shown(str(path))} is not a JSON object; name a model's config.json")
    return content


def _sides(arguments: argparse.Namespace, shape: ModelCacheShape) -> list[Sides]:
    """Return the pairs of P and D to compare: equal sides, then other TP and other block size, in
    both directions.
    """
    tp, block = arguments.tp, arguments.block_size
    other_tp, other_block = (
        arguments.peer_tp or _default_peer_tp(shape, tp),
        arguments.peer_block_size or min(2 * block, MAX_BLOCK_SIZE // block * block),
    )
    shape.check_tp(other_tp, "--peer-tp")
    if max(block, other_block) % min(block, other_block):
        raise ConfigError(
            f"--peer-block-size {other_block} does not fit --block-size {block}; one must divide "
            "the other"
        )
    if max(block, other_block) > MAX_BLOCK_RATIO * min(block, other_block):
        raise ConfigError(
            f"--peer-block-size {other_block} and --block-size {block} are too far apart to plan; "
            f"the larger may be at most {MAX_BLOCK_RATIO} times the smaller"
        )
    both = [Sides(tp, tp, block, block)]
    if other_tp != tp:
        both += [Sides(other_tp, tp, block, block), Sides(tp, other_tp, block, block)]
    if other_block != block:
        both += [Sides(tp, tp, block, other_block), Sides(tp, tp, other_block, block)]
    return both


def _default_peer_tp(shape: ModelCacheShape, tp: int) -> int:
    """Return twice our TP, or our TP if the KV heads cannot be divided that way."""
    return (
        2 * tp
        if all(
            group.kind is LayerCacheKind.LATENT or can_divide(group.kv_heads, 2 * tp)
            for group in shape.groups
        )
        else tp
    )


def _layouts(shape: ModelCacheShape) -> list[str]:
    """Return the layouts to compare; a cross-layer layout needs layers that are all alike."""
    return [layout for layout in LAYOUTS if layout != CROSS_LAYER or len(shape.groups) == 1]


def _notes(shape: ModelCacheShape, tp: int) -> list[str]:
    notes = []
    if any(group.window is not None for group in shape.groups):
        late = shape.bytes_per_late_token()
        notes.append(
            "layers with a sliding window hold at most that many tokens: after them a token adds "
            f"{late:,} bytes, and long prompts are smaller than bytes per token suggest"
        )
    if any(group.kind is LayerCacheKind.LATENT for group in shape.groups):
        notes.append(
            "latent attention caches one vector for all heads: every rank holds and reads all of "
            "it, at any tensor-parallel size"
        )
    if tp > 1 and any(
        group.kind is not LayerCacheKind.LATENT and group.kv_heads < tp for group in shape.groups
    ):
        notes.append(
            "there are more ranks than KV heads: neighbouring ranks hold the same head, so all "
            "ranks together hold some bytes more than once"
        )
    return notes
