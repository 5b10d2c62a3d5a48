"""Writes the parts of docs/ that come from the code: messages, states, settings and flags.
`make docs` runs it, a check sees that it was.

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of a page is written
by people.
"""

import ast
import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from kvferry.cli.main import make_parser
from kvferry.config import (
    CpuTierConfig,
    DecodeBenchExtraConfig,
    DiskTierConfig,
    ExampleExtraConfig,
    KVTransferConfig,
    MooncakeExtraConfig,
    MooncakeTierConfig,
    MultiExtraConfig,
    NixlExtraConfig,
    ObjectTierConfig,
    OffloadingExtraConfig,
    P2pNcclExtraConfig,
)
from kvferry.config.fields import described
from kvferry.connectors.offloading.metadata import LOOKUP_COUNTERS, TIER_COUNTERS, TIER_LEVELS
from kvferry.protocol.consumer.states import IGNORED, TRANSITIONS
from kvferry.router.fleet.health import HealthOptions
from kvferry.router.fleet.services import DiscoveryOptions
from kvferry.router.options import (
    ConversationOptions,
    RouterLimits,
    RouterOptions,
    RoutingOptions,
    Timeouts,
)
from kvferry.router.serving.admission import AdmissionOptions

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvferry"


def main() -> int:
    """Rewrite stale pages; with --check only say which they are."""
    is_check = "--check" in sys.argv[1:]
    stale = [
        page for page, text in generated_pages().items() if page.read_text(encoding="utf-8") != text
    ]
    for page in stale:
        print(
            f"{page.relative_to(ROOT)} is {'stale; run make docs' if is_check else 'written anew'}"
        )
        if not is_check:
            page.write_text(generated_pages()[page], encoding="utf-8")
    return int(is_check and bool(stale))


def generated_pages() -> dict[Path, str]:
    tables = {
        "protocol.md": {"messages": message_table(), "transitions": transition_table()},
        "configuration.md": {
            "transfer": settings_table(KVTransferConfig),
            "nixl": settings_table(NixlExtraConfig),
            "p2p-nccl": settings_table(P2pNcclExtraConfig),
            "mooncake": settings_table(MooncakeExtraConfig),
            "multi": settings_table(MultiExtraConfig),
            "offloading": settings_table(OffloadingExtraConfig),
            "example": settings_table(ExampleExtraConfig),
            "decode-bench": settings_table(DecodeBenchExtraConfig),
            **{
                f"{tier.name}-tier": settings_table(tier)
                for tier in (CpuTierConfig, DiskTierConfig, MooncakeTierConfig, ObjectTierConfig)
            },
            **{name: flag_table(name) for name in ("serve", "proxy", "register", "drain", "up")},
        },
    }
    tables["router.md"] = {"router": router_table()}
    tables["tiers.md"] = {"metrics": tier_metrics_table()}
    return {
        ROOT / "docs" / name: fill(ROOT / "docs" / name, parts) for name, parts in tables.items()
    }


def fill(page: Path, parts: dict[str, str]) -> str:
    text = page.read_text(encoding="utf-8")
    for name, table in parts.items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"{page.name} has no place for the table {name}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def router_table() -> str:
    """The tables of the router's configuration file."""
    rows = ["| table | key | default | meaning |", "|---|---|---|---|"]
    for table in (
        Timeouts,
        RouterLimits,
        AdmissionOptions,
        RoutingOptions,
        HealthOptions,
        ConversationOptions,
        DiscoveryOptions,
    ):
        name = next(
            field.name
            for field in dataclasses.fields(RouterOptions)
            if field.default_factory is table
        )
        meanings = dict(fields(next(classes(Path(inspect.getfile(table)), table.__name__))))
        for field in dataclasses.fields(table):
            rows.append(
                f"| `{name}` | `{field.name}` | {shown_default(field.default)} | "
                f"{meanings[field.name]} |"
            )
    return "\n".join(rows)


def shown_default(value: object) -> str:
    return "" if value is None else f"`{value}`"


def message_table() -> str:
    rows = ["| message | fields | meaning |", "|---|---|---|"]
    region = classes(SOURCE / "types.py", "Region")
    for node in (*classes(SOURCE / "protocol" / "messages.py"), *region):
        names = ", ".join(f"`{name}`" for name, _ in fields(node))
        rows.append(f"| `{node.name}` | {names} | {docstring(node)} |")
    return "\n".join(rows)


def transition_table() -> str:
    rows = ["| state | event | next state |", "|---|---|---|"]
    followed = {**TRANSITIONS, **dict.fromkeys(IGNORED, "(ignored)")}
    return "\n".join(
        [
            *rows,
            *(
                f"| {state} | {event} | {after} |"
                for (state, event), after in sorted(followed.items())
            ),
        ]
    )


def settings_table(settings: type) -> str:
    """Kinds and defaults as users write them; the meaning is the sentence below a field, and every
    field has one. Inherited settings are in the table of the class that has them.
    """
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    hints = get_type_hints(settings, include_extras=True)
    source = next(classes(Path(inspect.getfile(settings)), settings.__name__))
    meanings = dict(fields(source))
    for field in dataclasses.fields(settings):
        # A class may add fields to those of another connector, which has a table of its own.
        if not field.init or field.name not in meanings:
            continue
        if not meanings[field.name]:
            raise SystemExit(
                f"{settings.__name__}.{field.name} has no sentence below it that says what it means"
            )
        value = one_line(described(hints[field.name]))
        value = value.replace(" that is not empty and has no NUL character", "")
        rows.append(f"| `{field.name}` | {value} | {default_of(field)} | {meanings[field.name]} |")
    return "\n".join(rows)


def tier_metrics_table() -> str:
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for prefix, kind, meanings in (
        ("kvferry:offload", "counter", LOOKUP_COUNTERS),
        ("kvferry:tier", "counter by tier", TIER_COUNTERS),
        ("kvferry:tier", "gauge by tier", TIER_LEVELS),
    ):
        rows += (f"| `{prefix}_{name}` | {kind} | {text} |" for name, text in meanings.items())
    return "\n".join(rows)


def default_of(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default)}`"
    if field.default_factory is dataclasses.MISSING:
        return "required"
    return "`{}`" if field.default_factory is dict else "random"


def flag_table(command: str) -> str:
    rows = ["| flag | value | default | meaning |", "|---|---|---|---|"]
    for row in make_parser(command).flag_rows():
        if not row.meaning:
            raise SystemExit(f"{row.names[0]} of kvferry {command} has no help")
        names = ", ".join(f"`{name}`" for name in row.names)
        rows.append(
            f"| {names} | {one_line(row.values)} | {one_line(row.default)} | "
            f"{one_line(row.meaning)} |"
        )
    return "\n".join(rows)


def classes(path: Path, name: str = "") -> Iterator[ast.ClassDef]:
    """Those of a module, or the one of that name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and name in ("", node.name):
            yield node


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The name of each annotated field, as it is sent, and the sentence below it."""
    for index, part in enumerate(node.body):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            after = node.body[index + 1] if index + 1 < len(node.body) else None
            meaning = (
                after.value.value
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                else ""
            )
            named = part.value.keywords if isinstance(part.value, ast.Call) else ()
            sent = [ast.literal_eval(each.value) for each in named if each.arg == "name"]
            yield (sent or [part.target.id])[0], one_line(str(meaning))


def docstring(node: ast.ClassDef) -> str:
    return one_line(ast.get_docstring(node) or "")


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
