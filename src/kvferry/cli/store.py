"""`kvferry store` lists, checks and clears what the storage tiers hold.

Engines may use the same storages meanwhile: nothing here takes a lock that an engine waits for. The
work is in `kvferry.tiers.inventory`; this module reads arguments and shows results.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvferry.cli.arguments import Parser, parse_path
from kvferry.cli.extras import check_extra
from kvferry.cli.runtime import stop_signals
from kvferry.config import ClusterSecret, ObjectTierConfig
from kvferry.config.secret import FILE_NAME, FILE_VARIABLE, TEXT_VARIABLE, runtime_directory
from kvferry.errors import ConfigError
from kvferry.logs import one_line
from kvferry.tiers.inventory.base import Inventory, NamespaceSummary
from kvferry.tiers.inventory.disk import DiskInventory
from kvferry.tiers.inventory.pool import PoolInventory
from kvferry.tiers.inventory.verify import OnDamage, Verification, verify
from kvferry.tiers.pool.reader import SegmentInfo
from kvferry.tiers.pool.segment_files import default_folder
from kvferry.transports.copy.rows import CpuRowCopier

DESCRIPTION = (
    "List, check and clear the KV that storage tiers hold. Engines may go on using them.\n\n"
    "  ls      the namespaces: model, dtype, weights, rank, objects, bytes, last use\n"
    "  stat    one namespace, with everything that its objects depend on\n"
    "  verify  read all objects and check every byte; the exit code is 1 if one is damaged\n"
    "  clear   delete all objects, or those of one namespace\n\n"
    "Without --disk, --object and --pool, ls, stat and verify look at this user's host pool.\n"
    "verify needs the secret with which the engines run (KVFERRY_SECRET_FILE, or this user's own)."
)
EXAMPLES = """\
  kvferry store ls
  kvferry store ls --disk /data/kv --object kv-cache --endpoint https://s3.example.com
  kvferry store stat --disk /data/kv --namespace 3f2a
  kvferry store verify --disk /data/kv --remove
  kvferry store clear --disk /data/kv --namespace 3f2a --yes
  kvferry store ls --disk /data/kv --json | jq '.namespaces[].bytes'"""

ACTIONS = ("ls", "stat", "verify", "clear")
NUM_THREADS = 4
MAX_SHOWN = 20
"""Damaged objects in the text; --json has up to 1,000."""
PROGRESS_INTERVAL_S = 5.0


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "action", metavar="ACTION", choices=ACTIONS, help=f"one of {', '.join(ACTIONS)}"
    )
    parser.add_argument("--disk", type=parse_path, metavar="PATH", help="folder of a disk tier")
    parser.add_argument("--object", metavar="BUCKET", help="bucket of an object tier")
    parser.add_argument(
        "--endpoint", metavar="URL", help="URL of the bucket's object store (default: Amazon's)"
    )
    parser.add_argument(
        "--prefix",
        default=ObjectTierConfig.prefix,
        help="start of the objects' names in the bucket (default: %(default)s)",
    )
    parser.add_argument(
        "--region", help="region of the bucket (default: from the environment, else us-east-1)"
    )
    parser.add_argument(
        "--pool",
        type=parse_path,
        metavar="PATH",
        help=f"folder of a host pool, as {default_folder()}",
    )
    parser.add_argument(
        "--namespace", metavar="HEX", help="only the namespace that starts with these digits"
    )
    parser.add_argument(
        "--remove", action="store_true", help="verify: delete the objects that are damaged"
    )
    parser.add_argument("--yes", action="store_true", help="clear: delete without asking")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    with stop_signals():
        places = [
            _Place(inventory, _chosen(inventory, arguments.namespace))
            for inventory in _inventories(arguments)
        ]
        if arguments.namespace is not None and not any(place.namespaces for place in places):
            raise ConfigError(
                f"no namespace starts with {arguments.namespace!a}; `kvferry store ls` lists them"
            )
        action: Callable[[argparse.Namespace, Sequence[_Place]], int] = {
            "ls": _list,
            "stat": _stat,
            "verify": _verify,
            "clear": _clear,
        }[arguments.action]
        return action(arguments, places)


@dataclass(frozen=True, slots=True)
class _Place:
    """A storage and the namespaces in it that the command is about."""

    inventory: Inventory
    namespaces: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.inventory.tier} {self.inventory.place}"

    def summaries(self) -> Iterator[NamespaceSummary]:
        for namespace in self.namespaces:
            progress = _Progress(f"{self.title}: counting, {{:,}} objects so far")
            yield self.inventory.summary(namespace, progress.note)


# -- arguments --


def _check(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags that do not fit together."""
    if arguments.endpoint is not None and arguments.object is None:
        raise ConfigError("--endpoint is for a bucket; name the bucket with --object")
    if arguments.remove and arguments.action != "verify":
        raise ConfigError("--remove is for `kvferry store verify`; `clear` deletes sound objects")
    if arguments.action == "clear" and not any(_named(arguments)):
        raise ConfigError("clear deletes nothing by itself; name --disk, --object or --pool")
    digits = arguments.namespace
    if digits is not None and not set(digits) <= set("0123456789abcdef"):
        raise ConfigError(
            f"--namespace {digits[:80]!a} is not made of hex digits; `kvferry store ls` lists the "
            "namespaces"
        )


def _named(arguments: argparse.Namespace) -> tuple[object, ...]:
    return arguments.disk, arguments.object, arguments.pool


def _inventories(arguments: argparse.Namespace) -> list[Inventory]:
    is_default = not any(_named(arguments))
    needs_secret = arguments.action == "verify" and any((arguments.disk, arguments.object))
    secret = _secret(os.environ) if needs_secret else b""
    found: list[Inventory] = []
    if arguments.pool or is_default:
        found.append(PoolInventory(arguments.pool or default_folder(), CpuRowCopier))
    if arguments.disk:
        found.append(DiskInventory(arguments.disk, secret))
    if arguments.object:
        check_extra("kvferry store --object", "object")
        # Imported on demand: it needs a package of an extra.
        from kvferry.tiers.inventory.bucket import BucketInventory
        from kvferry.tiers.object_store import Bucket

        place = Bucket(arguments.object, arguments.prefix, arguments.endpoint, arguments.region)
        found.append(BucketInventory(place, secret))
    return found


def _secret(environ: Mapping[str, str]) -> bytes:
    """The secret as engines find it. Does not make one: no object would match a new secret."""
    own = runtime_directory(environ) / FILE_NAME
    is_given = any(name in environ for name in (FILE_VARIABLE, TEXT_VARIABLE))
    if not is_given and not os.path.lexists(own):
        raise ConfigError(
            f"there is no secret to check objects with; set {FILE_VARIABLE} to the file with the "
            "engines' secret"
        )
    return ClusterSecret.load(environ).key


def _chosen(inventory: Inventory, digits: str | None) -> tuple[str, ...]:
    found = tuple(sorted(inventory.namespaces()))
    if digits is None:
        return found
    fitting = tuple(namespace for namespace in found if namespace.startswith(digits))
    if len(fitting) > 1:
        raise ConfigError(
            f"--namespace {digits} fits {len(fitting)} namespaces in {inventory.place}; give more "
            "digits"
        )
    return fitting


# -- ls and stat --


def _list(arguments: argparse.Namespace, places: Sequence[_Place]) -> int:
    if arguments.json:
        names = ("architecture", "cache_dtype", "weights", "tp_rank", "tp_size")
        found = [_as_json(each, summary, names) for each in places for summary in each.summaries()]
        print(json.dumps({"namespaces": found}, indent=2))
        return 0
    for number, place in enumerate(places):
        print(("\n" if number else "") + place.title)
        rows = [_row(summary) for summary in place.summaries()]
        head = ["namespace", "model", "dtype", "weights", "rank", "objects", "bytes", "last use"]
        if place.inventory.tier == "cpu":
            head.append("owner")
        print("\n".join(_table(head, rows)) if rows else "  holds no KV")
    return 0


def _stat(arguments: argparse.Namespace, places: Sequence[_Place]) -> int:
    places = [place for place in places if place.namespaces]
    if len({namespace for place in places for namespace in place.namespaces}) != 1:
        count = sum(len(place.namespaces) for place in places)
        raise ConfigError(
            f"stat shows one namespace, and there are {count}; choose one with --namespace"
        )
    found = [(place, summary) for place in places for summary in place.summaries()]
    if arguments.json:
        print(json.dumps({"namespaces": [_as_json(*each) for each in found]}, indent=2))
        return 0
    print(f"namespace {found[0][1].namespace}")
    for place, summary in found:
        print(
            f"{place.title}: {summary.num_objects:,} objects, {_size(summary.used_bytes)}, last "
            f"used {_when(summary.last_used_s)}"
        )
        for segment in summary.segments:
            owner = (
                f"process {segment.header.owner_pid} owns it"
                if segment.is_live
                else f"without an owner since process {segment.header.owner_pid} ended"
            )
            rows = f"{segment.num_objects:,} of {segment.header.layout.num_rows:,} rows in use"
            print(one_line(f"  {segment.path}: {_size(segment.total_bytes)}, {rows}, {owner}"))
    factors = next((summary.factors for _, summary in found if summary.factors), None)
    if factors is None:
        print("what its objects depend on is not known: no storage has a valid description")
        return 0
    print("its objects depend on:")
    width = min(40, max(map(len, factors)))
    for name, value in sorted(factors.items()):
        print(one_line(f"  {name:<{width}}  {json.dumps(value)}"))
    return 0


def _row(summary: NamespaceSummary) -> list[str]:
    factors = summary.factors or {}
    model = str(factors.get("architecture", "unknown"))
    layers = factors.get("num_layers")
    row = [
        summary.namespace,
        f"{model} ({layers} layers)" if layers else model,
        str(factors.get("cache_dtype", "")),
        str(factors.get("weights", ""))[:12],
        _rank(factors),
        f"{summary.num_objects:,}",
        _size(summary.used_bytes),
        _when(summary.last_used_s),
    ]
    if summary.segments:
        row.append(
            ", ".join(
                str(segment.header.owner_pid) if segment.is_live else "none"
                for segment in summary.segments
            )
        )
    return row


def _rank(factors: Mapping[str, Any]) -> str:
    if "tp_size" not in factors:
        return ""
    return f"{factors.get('tp_rank')} of {factors['tp_size']}"


def _as_json(
    place: _Place, summary: NamespaceSummary, names: Sequence[str] | None = None
) -> dict[str, Any]:
    """`names` are the factors to show; None: all of them."""
    factors = summary.factors or {}
    shown = dict(factors) if names is None else {name: factors.get(name) for name in names}
    row: dict[str, Any] = {
        "tier": place.inventory.tier,
        "place": place.inventory.place,
        "namespace": summary.namespace,
        "factors": shown if summary.factors is not None else None,
        "objects": summary.num_objects,
        "bytes": summary.used_bytes,
        "last_used": _when(summary.last_used_s) if summary.last_used_s else None,
    }
    if summary.segments:
        row["segments"] = [_segment_json(segment) for segment in summary.segments]
    return row


def _segment_json(segment: SegmentInfo) -> dict[str, Any]:
    return {
        "path": str(segment.path),
        "owner_pid": segment.header.owner_pid,
        "is_live": segment.is_live,
        "num_objects": segment.num_objects,
        "num_rows": segment.header.layout.num_rows,
        "total_bytes": segment.total_bytes,
    }


# -- verify and clear --


def _verify(arguments: argparse.Namespace, places: Sequence[_Place]) -> int:
    on_damage = OnDamage.REMOVE if arguments.remove else OnDamage.REPORT
    found = []
    for place in places:
        progress = _Progress(f"{place.title}: {{:,}} objects checked")
        result = verify(place.inventory, place.namespaces, on_damage, NUM_THREADS, progress.note)
        found.append((place, result))
        if not arguments.json:
            print("\n".join(_verified(place, result, on_damage)))
    if arguments.json:
        print(json.dumps({"places": [_verified_as_json(*each) for each in found]}, indent=2))
    return int(any(result.num_bad or result.num_unchecked for _, result in found))


def _verified(place: _Place, result: Verification, on_damage: OnDamage) -> Iterator[str]:
    yield (
        f"{place.title}: {result.num_checked:,} objects checked, {result.num_sound:,} sound, "
        f"{result.num_bad:,} damaged, {result.num_unchecked:,} could not be checked"
    )
    for bad in result.bad[:MAX_SHOWN]:
        yield one_line(f"  {bad.namespace} {bad.name} {bad.result.reason}")
    unlisted = result.num_bad + result.num_unchecked - min(MAX_SHOWN, len(result.bad))
    if unlisted:
        yield f"  and {unlisted:,} more; --json lists up to 1,000"
    if on_damage is OnDamage.REMOVE:
        yield f"  {result.num_removed:,} removed"
        if result.num_removed < result.num_bad:
            yield f"  {_why_not_removed(place, result)}"
    elif result.num_bad:
        yield "  engines refuse damaged objects; --remove deletes them"


def _why_not_removed(place: _Place, result: Verification) -> str:
    if place.inventory.tier == "cpu":
        return "rows of a running engine stay: only the engine writes its segment"
    if not result.is_secret_proven:
        return (
            "no object matches this secret, so it may be another cluster's; set "
            f"{FILE_VARIABLE}, or delete all with `kvferry store clear`"
        )
    return "engines removed the others, or the storage did not allow it"


def _verified_as_json(place: _Place, result: Verification) -> dict[str, Any]:
    return {
        "tier": place.inventory.tier,
        "place": place.inventory.place,
        "checked": result.num_checked,
        "sound": result.num_sound,
        "damaged": result.num_bad,
        "unchecked": result.num_unchecked,
        "removed": result.num_removed,
        "objects": [
            {
                "namespace": bad.namespace,
                "name": bad.name,
                "condition": bad.result.condition.value,
                "reason": bad.result.reason,
            }
            for bad in result.bad
        ],
    }


def _clear(arguments: argparse.Namespace, places: Sequence[_Place]) -> int:
    if not arguments.yes:
        what = "; ".join(
            f"{sum(one.num_objects for one in all_of_it):,} objects of {len(all_of_it)} "
            f"namespaces, {_size(sum(one.used_bytes for one in all_of_it))}, in {place.title}"
            for place, all_of_it in ((place, list(place.summaries())) for place in places)
        )
        raise ConfigError(f"clear would delete {what}; add --yes to delete them")
    rows = []
    for place in places:
        progress = _Progress(f"{place.title}: {{:,}} objects deleted")
        gone = sum(place.inventory.clear(each, progress.note) for each in place.namespaces)
        left = [each for each in place.namespaces if each in set(place.inventory.namespaces())]
        rows.append((place, gone, left))
    if arguments.json:
        print(
            json.dumps(
                {
                    "places": [
                        {
                            "tier": place.inventory.tier,
                            "place": place.inventory.place,
                            "deleted": gone,
                            "left": left,
                        }
                        for place, gone, left in rows
                    ]
                },
                indent=2,
            )
        )
        return 0
    for place, gone, left in rows:
        note = f"; engines are still using {', '.join(left)}" if left else ""
        print(f"{place.title}: {gone:,} objects deleted{note}")
    return 0


# -- text --


class _Progress:
    """Prints to standard error every few seconds; standard output is for results."""

    def __init__(self, text: str) -> None:
        """`text` has a place for the number of objects so far."""
        self._text = text
        self._next = time.monotonic() + PROGRESS_INTERVAL_S

    def note(self, num_objects: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_INTERVAL_S
            print(f"kvferry: {self._text.format(num_objects)}", file=sys.stderr, flush=True)


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    rows = [[one_line(cell) for cell in row] for row in (head, *body)]
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(len(head))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        for row in rows
    ]


def _size(size_bytes: int) -> str:
    if size_bytes < 1024:
        return f"{size_bytes} B"
    power = min(4, (size_bytes.bit_length() - 1) // 10)
    return f"{size_bytes / 1024**power:,.1f} {' KMGT'[power]}iB"


def _when(seconds: float) -> str:
    if not seconds:
        return "never"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OSError, OverflowError, ValueError):  # a damaged segment, or a file from the year 10000
        return "unknown"
