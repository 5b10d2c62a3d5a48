"""`kvferry plan` computes the size of a model's KV cache, the time to move the cache, and settings.

Reads only config.json and loads no weights. `make_plan` computes a `Plan`;
`kvferry.cli.plan_report` shows it.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Annotated, Any

from kvferry.cli.arguments import NumberOf, Parser, whole
from kvferry.cli.checkpoints import find_config
from kvferry.cli.plan_report import Plan, plan_as_json, plan_as_text
from kvferry.config.fields import parsed, shown, span
from kvferry.errors import ConfigError
from kvferry.protocol.planning.heads import can_divide
from kvferry.sizing.hf_config import MAX_HEADS, MAX_LAYERS, auto_dtype, shape_of_config
from kvferry.sizing.segments import CROSS_LAYER, LAYOUTS, Sides, count_segments
from kvferry.sizing.shape import (
    DTYPE_BYTES,
    LATENT_DTYPE,
    LayerCacheKind,
    LayerGroup,
    ModelCacheShape,
    canonical_dtype,
)
from kvferry.sizing.tiers import DEFAULT_TIERS, TierSpeed, tier_row
from kvferry.sizing.transfer import (
    DEFAULT_LINKS,
    DEFAULT_TOKENS,
    NetworkLink,
    Units,
    advise_block_size,
    advise_lease,
    advise_read_timeout,
    prompt_row,
)

DESCRIPTION = (
    "Compute how large a model's KV cache is, how long a prompt's KV takes over a link, how many "
    "segments that makes, from how many\ntokens on loading KV from a storage tier beats computing "
    "it, and what to set."
)
EXAMPLES = """\
  kvferry plan /models/tiny
  kvferry plan --layers 80 --kv-heads 8 --head-dim 128 --dtype bfloat16
  kvferry plan /models/tiny/config.json --tp 2 --link 'Ethernet=100' --link 'IB NDR=400' --tokens 2K --tokens 100000
  kvferry plan /models/tiny --prefill 12000 --tier disk=6.8:1 --tier 'object=2.9:35' --tier-gib 512
  kvferry plan /models/tiny --json | jq .bytes_per_token"""  # noqa: E501

DEFAULT_DTYPE = "bfloat16"
MAX_CONFIG_BYTES = 16 * 2**20
TOKENS = re.compile(r"([0-9]{1,18})([kKmM]?)")
FACTORS = {"": 1, "k": 1_000, "m": 1_000_000}
MAX_TOKENS = 1_000_000_000
MAX_TP = 1_024
MAX_BLOCK_SIZE = 8_192
MAX_BLOCK_RATIO = 256
MAX_HEAD_DIM = 65_536
MAX_TIER_GIB = 1 << 30
Gbit = Annotated[float, span("a number", 1e-6, 1e9)]
Rate = Annotated[float, span("a number", 0.001, 10**12)]
Milliseconds = Annotated[float, span("a number", 0, 1e12)]
SIZE_FLAGS = ("--layers", "--kv-heads", "--head-dim")


def add_arguments(parser: Parser) -> None:
    _add_model_arguments(parser)
    _add_engine_arguments(parser)
    _add_link_and_tier_arguments(parser)
    parser.add_argument(
        "--exact",
        action="store_true",
        help="count 1 GB as 1,000,000,000 bytes everywhere, also for the times",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_model_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder of a checkpoint, its config.json, or owner/name on the Hugging Face hub",
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit on the hub (default: main)"
    )
    parser.add_argument(
        "--layers",
        type=whole(1, MAX_LAYERS),
        metavar="N",
        help="number of layers, instead of MODEL; with --kv-heads and --head-dim",
    )
    parser.add_argument(
        "--kv-heads",
        type=whole(1, MAX_HEADS),
        metavar="N",
        help="KV heads per layer, instead of MODEL",
    )
    parser.add_argument(
        "--head-dim",
        type=whole(1, MAX_HEAD_DIM),
        metavar="N",
        help="numbers per head, instead of MODEL",
    )
    dtypes = ", ".join([*DTYPE_BYTES, LATENT_DTYPE])
    parser.add_argument(
        "--dtype",
        default="auto",
        help=f"dtype of the cache: {dtypes} (default: the dtype of MODEL, else {DEFAULT_DTYPE})",
    )


def _add_engine_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--block-size",
        type=whole(1, MAX_BLOCK_SIZE),
        default=16,
        metavar="N",
        help="tokens per block (default: %(default)s)",
    )
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=whole(1, MAX_TP),
        default=1,
        metavar="N",
        help="tensor-parallel ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--peer-tp",
        type=whole(1, MAX_TP),
        metavar="N",
        help="ranks of the other side, for the segments (default: twice --tp)",
    )
    parser.add_argument(
        "--peer-block-size",
        type=whole(1, MAX_BLOCK_SIZE),
        metavar="N",
        help="block size of the other side, for the segments (default: twice --block-size)",
    )


def _add_link_and_tier_arguments(parser: Parser) -> None:
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
        "--tier",
        type=parse_tier,
        action="append",
        metavar="NAME=GBPS[:MS]",
        help="a storage tier, its GB/s for all ranks together, and the ms to its first byte; may "
        "be repeated (default: what is usual for cpu, disk and object)",
    )
    parser.add_argument(
        "--prefill",
        type=NumberOf(Rate),
        metavar="TOKENS/S",
        help="how fast the engine computes prompts, to compare with loading",
    )
    parser.add_argument(
        "--tier-gib",
        type=whole(1, MAX_TIER_GIB),
        default=100,
        metavar="N",
        help="size of a tier in GiB, for the tokens that fit (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    plan = make_plan(arguments)
    if arguments.json:
        print(json.dumps(plan_as_json(plan), indent=2))
    else:
        print(plan_as_text(plan, _units(arguments)))
    return 0


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Compute the plan; ConfigError names an argument that is missing or does not fit."""
    name, shape, notes = _shape(arguments)
    tp, block = arguments.tp, arguments.block_size
    shape.check_tp(tp)
    links = tuple(arguments.link or DEFAULT_LINKS)
    rows = tuple(
        prompt_row(shape, tokens, links, tp, _units(arguments))
        for tokens in arguments.tokens or DEFAULT_TOKENS
    )
    longest, slowest = max(rows, key=lambda row: row.tokens), min(links, key=lambda link: link.gbit)
    longest_s = longest.size_bytes * 8 / (slowest.gbit * 1e9)
    segments = [
        count_segments(shape, layout, sides, longest.tokens)
        for sides in _sides(arguments, shape)
        for layout in _layouts(shape)
    ]
    tiers = tuple(
        tier_row(shape, tier, block, tp, arguments.tier_gib << 30, arguments.prefill)
        for tier in arguments.tier or DEFAULT_TIERS
    )
    advice = (
        advise_lease(longest_s, slowest, longest.size_bytes),
        advise_read_timeout(longest_s, slowest),
        advise_block_size(shape, tp),
    )
    return Plan(
        name=name,
        shape=shape,
        block_size=block,
        tp=tp,
        links=links,
        rows=rows,
        segments=tuple(segments),
        tiers=tiers,
        tier_gib=arguments.tier_gib,
        prefill=arguments.prefill,
        advice=advice,
        notes=(*notes, *_notes(shape, tp)),
    )


def _units(arguments: argparse.Namespace) -> Units:
    return Units.EXACT if arguments.exact else Units.ROUND


# -- values of flags --


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
        return NetworkLink(_label(name), parsed("", speed, Gbit))
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} is not a link; write it like 'Ethernet=100', a name and its Gbit/s"
        ) from None


def parse_tier(text: str) -> TierSpeed:
    """For argparse: parse a tier given as NAME=GBPS or NAME=GBPS:MS."""
    name, _, speed = text.rpartition("=")
    rate, _, latency = speed.partition(":")
    try:
        ms = parsed("", latency or "0", Milliseconds)
        return TierSpeed(_label(name), parsed("", rate, Rate), ms / 1000)
    except ConfigError:
        raise argparse.ArgumentTypeError(
            f"{text[:80]!a} is not a tier; write it like 'disk=6.5' or 'object=2.9:35', a name, "
            "its GB/s and the ms to its first byte"
        ) from None


def _label(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise ConfigError("a name is missing or cannot be shown")
    return name.strip()


# -- the model --


def _shape(arguments: argparse.Namespace) -> tuple[str, ModelCacheShape, list[str]]:
    """Return name, cache shape and notes of the model, from MODEL or from the size flags."""
    sizes = (arguments.layers, arguments.kv_heads, arguments.head_dim)
    given = [size for size in sizes if size is not None]
    if arguments.model is not None and given:
        raise ConfigError(
            f"MODEL and {', '.join(SIZE_FLAGS)} both describe a model; give one or the other"
        )
    if arguments.model is not None:
        return _shape_of_model(arguments.model, arguments.revision, arguments.dtype)
    if arguments.revision is not None:
        raise ConfigError("--revision needs MODEL, the owner/name on the hub")
    if len(given) < len(SIZE_FLAGS):
        raise ConfigError(
            f"MODEL is missing; name a folder or a config.json, or give {', '.join(SIZE_FLAGS)}"
        )
    dtype = DEFAULT_DTYPE if arguments.dtype == "auto" else canonical_dtype(arguments.dtype)
    group = LayerGroup(
        LayerCacheKind.FULL, arguments.layers, arguments.kv_heads, 2 * arguments.head_dim
    )
    return "a model of these sizes", ModelCacheShape((group,), dtype), []


def _shape_of_model(
    model: str, revision: str | None, requested_dtype: str
) -> tuple[str, ModelCacheShape, list[str]]:
    config = _read_config(find_config(model, revision))
    dtype = auto_dtype(config) if requested_dtype == "auto" else canonical_dtype(requested_dtype)
    if dtype is not None:
        return model, shape_of_config(config, dtype), []
    note = f"config.json does not name a dtype; {DEFAULT_DTYPE} is assumed, --dtype sets another"
    return model, shape_of_config(config, DEFAULT_DTYPE), [note]


def _read_config(path: Path) -> dict[str, Any]:
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


# -- the two sides --


def _sides(arguments: argparse.Namespace, shape: ModelCacheShape) -> list[Sides]:
    """Return the pairs of P and D to compare: equal sides, then other TP and other block size, in
    both directions.
    """
    tp, block = arguments.tp, arguments.block_size
    other_tp = arguments.peer_tp or _default_peer_tp(shape, tp)
    # Twice the block size; if that is too large, the largest multiple that is allowed.
    other_block = arguments.peer_block_size or min(2 * block, MAX_BLOCK_SIZE // block * block)
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
    sides = [Sides(tp, tp, block, block)]
    if other_tp != tp:
        sides += [Sides(other_tp, tp, block, block), Sides(tp, other_tp, block, block)]
    if other_block != block:
        sides += [Sides(tp, tp, block, other_block), Sides(tp, tp, other_block, block)]
    return sides


def _default_peer_tp(shape: ModelCacheShape, tp: int) -> int:
    """Return twice our TP, or our TP if the KV heads cannot be divided that way."""
    is_divisible = all(
        group.kind is LayerCacheKind.LATENT or can_divide(group.kv_heads, 2 * tp)
        for group in shape.groups
    )
    return 2 * tp if is_divisible else tp


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
