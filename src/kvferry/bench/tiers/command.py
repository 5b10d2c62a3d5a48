"""`kvferry bench tiers` measures the storage tiers beside what they are made of.

Copies to and from host memory beside memcpy, disk and object tier beside plain clients of the same
storage, the calls on the engine's thread, and the time to the first token from each tier beside
computing the prompt. In each part the contestants take turns, round after round, so that other load
on the machine affects all of them; the results are medians, with the worst beside them.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.bench.figures import rounded
from kvferry.bench.tiers.memory import MemoryScope, measure_memory
from kvferry.bench.tiers.rounds import Comparison
from kvferry.bench.tiers.steps import StepScope, measure_steps
from kvferry.bench.tiers.storage import StorageScope, measure_disk, measure_object, moto_bucket
from kvferry.bench.vllm.servers import COUNT, print_progress
from kvferry.cli.arguments import Parser
from kvferry.cli.extras import check_extra, missing_packages
from kvferry.cli.runtime import StopRequest, stop_requests
from kvferry.errors import ConfigError, KVFerryError
from kvferry.transports.copy.native import missing_native_functions

if TYPE_CHECKING:
    from kvferry.tiers.object_store import Bucket

DESCRIPTION = (
    "Measure the storage tiers on this machine. Parts:\n\n"
    "  memory  copies between a cache and rows of host memory, beside memcpy\n"
    "  disk    the disk tier, beside plain direct I/O on files with equally many threads\n"
    "  object  the object tier, beside plain obstore, on your store or on moto\n"
    "  steps   what lookups and stores cost the engine's thread, with 10,000 blocks in the pool\n"
    "  model   with --model: time to the first token of a prompt from each tier ÷ computing it\n\n"
    "Stop other work on the machine first."
)
EXAMPLES = """\
  kvferry bench tiers
  kvferry bench tiers --json --disk /data --only disk
  kvferry bench tiers --object kv-bench --endpoint https://s3.example.com --only object
  kvferry bench tiers --model /models/tiny --only model"""

PARTS = ("memory", "disk", "object", "steps", "model")
QUICK_MEMORY = MemoryScope(moved_mib=8, rounds=2)
QUICK_STORAGE = StorageScope(((256, 4), (2048, 2)), rounds=2)
QUICK_STEPS = StepScope((500, 1_000), 3)
PROMPT_TOKENS, QUICK_TOKENS, QUICK_ROUNDS = 4_000, 200, 1
OBJECT_SHAPES = ((256, 32), (2048, 16))
"""Fewer objects than on a disk: a server takes milliseconds for each."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=f"parts to measure: {', '.join(PARTS)} (default: all that can be measured here)",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=Path(tempfile.gettempdir()),
        metavar="PATH",
        help="folder on the disk to measure (default: the folder for temporary files)",
    )
    parser.add_argument("--object", metavar="BUCKET", help="bucket to measure, which must exist")
    parser.add_argument("--endpoint", metavar="URL", help="URL of the bucket's object store")
    parser.add_argument("--region", help="region of the bucket")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder of a checkpoint for the embedded engine"
    )
    parser.add_argument(
        "--tokens",
        type=COUNT,
        metavar="N",
        help=f"tokens of the prompts of the part model (default: {PROMPT_TOKENS}, or "
        "the model's maximum)",
    )
    parser.add_argument(
        "--threads",
        type=COUNT,
        metavar="N",
        help=f"threads for disk and object store (default: {StorageScope().threads}, as an "
        "engine's io_threads)",
    )
    parser.add_argument(
        "--rounds", type=COUNT, metavar="N", help="rounds of each part (default: its own)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use little memory and few rounds: shows whether it works, not how fast",
    )


def run(arguments: argparse.Namespace) -> int:
    parts = tuple(arguments.only or (part for part in PARTS if part != "model" or arguments.model))
    if "model" in parts:
        if arguments.model is None:
            raise ConfigError("the part model needs a checkpoint; name its folder with --model")
        check_extra("kvferry bench tiers --model", "engine")
    if arguments.object is not None:
        check_extra("kvferry bench tiers --object", "object")
    with stop_requests() as stop:
        found = _measure(arguments, parts, stop)
    found["machine"] = _machine()
    print(json.dumps(found) if arguments.json else "\n".join(report(found)).lstrip())
    return 1 if found["failed"] else 0


def _measure(
    arguments: argparse.Namespace, parts: Sequence[str], stop: StopRequest
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"rows": rows, "steps": [], "first_token": [], "skipped": []}
    found["failed"] = []
    if "memory" in parts:
        scope = _scaled(QUICK_MEMORY if arguments.quick else MemoryScope(), arguments.rounds)
        rows += _noted(measure_memory(scope, stop))
    if "disk" in parts:
        rows += _noted(measure_disk(arguments.disk, _storage(arguments, "disk"), stop))
    with _bucket(arguments, parts) as bucket:
        if bucket is not None and "object" in parts:
            rows += _noted(measure_object(bucket, _storage(arguments, "object"), stop))
        elif "object" in parts:
            why = "object: obstore and moto are not installed (pip install obstore 'moto[server]')"
            found["skipped"].append(why)
            print_progress(f"{why}; give a store of your own with --object")
        if "steps" in parts:
            scope = QUICK_STEPS if arguments.quick else StepScope()
            for cost in measure_steps(_scaled(scope, arguments.rounds), stop):
                found["steps"].append(cost.as_json())
                print_progress(f"steps: {cost.work}, {cost.pool_blocks:,} blocks in the pool")
        if "model" in parts:
            try:
                found["first_token"] = _first_token(arguments, bucket, stop)
            except KVFerryError as error:
                # The other parts took minutes: they are shown all the same.
                found["failed"].append(f"model: {error}")
    return found


def _noted(comparisons: Iterator[Comparison]) -> Iterator[dict[str, Any]]:
    for each in comparisons:
        print_progress(f"{each.part}: {each.work} of {each.size_bytes >> 10} KiB measured")
        yield each.as_json()


def _scaled(scope: Any, rounds: int | None) -> Any:
    return scope if rounds is None else replace(scope, rounds=rounds)


def _storage(arguments: argparse.Namespace, part: str) -> StorageScope:
    scope = QUICK_STORAGE if arguments.quick else StorageScope()
    if part == "object" and not arguments.quick:
        scope = replace(scope, shapes=OBJECT_SHAPES)
    if arguments.threads is not None:
        scope = replace(scope, threads=arguments.threads)
    scaled: StorageScope = _scaled(scope, arguments.rounds)
    return scaled


@contextmanager
def _bucket(arguments: argparse.Namespace, parts: Sequence[str]) -> "Iterator[Bucket | None]":
    """The user's bucket, or one of moto's server; None if there is neither, or no need."""
    if arguments.object is not None:
        from kvferry.tiers.object_store import Bucket

        yield Bucket(
            arguments.object, "kvferry-bench", arguments.endpoint, arguments.region or "us-east-1"
        )
    elif not {"object", "model"} & {*parts} or (
        missing_packages("object") or find_spec("moto") is None
    ):
        yield None
    else:
        print_progress("starting moto's S3 server")
        with moto_bucket() as bucket:
            yield bucket


def _first_token(
    arguments: argparse.Namespace, bucket: "Bucket | None", stop: StopRequest
) -> list[dict[str, Any]]:
    # Imported here because it needs packages of the extra [engine], and the other parts do not.
    from kvferry.bench.tiers.first_token import (
        FirstTokenScope,
        measure_first_token,
        prompt_tokens,
        tier_setups,
    )

    scope = FirstTokenScope()
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else scope.rounds)
    wanted = arguments.tokens or (QUICK_TOKENS if arguments.quick else PROMPT_TOKENS)
    tokens = prompt_tokens(arguments.model, wanted)
    object_tier = None
    if bucket is not None:
        object_tier = {
            "bucket": bucket.name,
            "endpoint": bucket.endpoint,
            "region": bucket.region,
            "prefix": bucket.prefix,
        }
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=arguments.disk) as disk:
        setups = tier_setups(scope, Path(disk), object_tier)
        print_progress(f"model: starting {len(setups)} engines")
        times = measure_first_token(arguments.model, setups, tokens, rounds, stop)
    return [each.as_json(times[0]) for each in times]


def _machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": rounded(os.getloadavg()[0]),
        "missing_native_functions": list(missing_native_functions()),
    }


# -- text --


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the tables."""
    if found["rows"]:
        yield (
            f"{'part':<8}{'work':<7}{'KiB':>6}{'GB/s':>9}{'worst':>9}  {'baseline':<15}{'GB/s':>8}"
            f"{'worst':>9}{'÷ it':>8}"
        )
    for row in found["rows"]:
        yield (
            f"{row['part']:<8}{row['work']:<7}{row['size_bytes'] >> 10:>6}{row['gbps']:>9}"
            f"{row['worst_gbps']:>9}  {row['baseline']:<15}{row['baseline_gbps']:>8}"
            f"{row['baseline_worst_gbps']:>9}{row['of_baseline']:>8}"
        )
    if found["steps"]:
        yield ""
        yield (
            f"{'on the engine thread':<34}{'blocks':>8}{'chunks':>8}{'after ms':>10}{'µs':>10}"
            f"{'p99':>10}{'worst':>10}"
        )
    for row in found["steps"]:
        yield (
            f"{row['work']:<34}{row['pool_blocks']:>8,}{row['chunks']:>8}{row['after_ms']:>10}"
            f"{row['us']:>10,}{row['us_p99']:>10,}{row['us_worst']:>10,}"
        )
    if found["first_token"]:
        tokens = found["first_token"][0]["tokens"]
        yield ""
        yield f"time to the first token of {tokens:,} tokens, ms (worst); ÷ computing without tiers"
        yield f"{'tier':<10}{'loaded':>20}{'÷':>8}{'nothing stored':>22}{'÷':>8}"
    for row in found["first_token"]:
        loaded = f"{row['loaded_ms']:,} ({row['loaded_worst_ms']:,})" if row["loaded_ms"] else ""
        computed = f"{row['computed_ms']:,} ({row['computed_worst_ms']:,})"
        yield (
            f"{row['tier']:<10}{loaded:>20}{row['loaded_of_computing'] or '':>8}{computed:>22}"
            f"{row['computed_of_no_tiers']:>8}"
        )
    yield from (f"not measured: {why}" for why in (*found["skipped"], *found["failed"]))
