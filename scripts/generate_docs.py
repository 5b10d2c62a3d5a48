"""Writes the tables in docs/ that come from the code: messages, states, settings. `make docs` runs it, a test checks that it was run.

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the rest of a page is written by people.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from kvferry.protocol.transfers import TRANSITIONS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvferry"


def main() -> int:
    """Rewrite stale pages; with --check only say which they are."""
    is_check = "--check" in sys.argv[1:]
    stale = [page for page, text in generated_pages().items() if page.read_text(encoding="utf-8") != text]
    for page in stale:
        print(f"{page.relative_to(ROOT)} is {'stale; run make docs' if is_check else 'written anew'}")
        if not is_check:
            page.write_text(generated_pages()[page], encoding="utf-8")
    return int(is_check and bool(stale))


def generated_pages() -> dict[Path, str]:
    tables = {
        "protocol.md": {"messages": message_table(), "transitions": transition_table()},
        "configuration.md": {
            "transfer": settings_table(SOURCE / "config" / "transfer.py", "KVTransferConfig"),
            "nixl": settings_table(SOURCE / "config" / "extra.py", "NixlExtraConfig"),
        },
    }
    return {ROOT / "docs" / name: fill(ROOT / "docs" / name, parts) for name, parts in tables.items()}


def fill(page: Path, parts: dict[str, str]) -> str:
    text = page.read_text(encoding="utf-8")
    for name, table in parts.items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->")
        _, end, after = rest.partition(f"<!-- end {name} -->")
        if not end:
            raise SystemExit(f"{page.name} has no place for the table {name}")
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def message_table() -> str:
    rows = ["| message | fields | meaning |", "|---|---|---|"]
    for node in classes(SOURCE / "protocol" / "messages.py"):
        names = ", ".join(f"`{name}`" for name, _, _, _ in fields(node))
        rows.append(f"| `{node.name}` | {names} | {docstring(node)} |")
    return "\n".join(rows)


def transition_table() -> str:
    rows = ["| state | event | next state |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| {state} | {event} | {after} |" for (state, event), after in sorted(TRANSITIONS.items()))])


def settings_table(path: Path, class_name: str) -> str:
    rows = ["| key | kind | default | meaning |", "|---|---|---|---|"]
    node = next(node for node in classes(path) if node.name == class_name)
    for name, kind, default, meaning in fields(node):
        if not default.startswith("field(init=False"):
            rows.append(f"| `{name}` | {kind} | {default} | {meaning} |")
    return "\n".join(rows)


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield node


def fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str, str]]:
    """Name, kind, default and the sentence below each annotated field."""
    for index, part in enumerate(node.body):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            after = node.body[index + 1] if index + 1 < len(node.body) else None
            meaning = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            default = ast.unparse(part.value) if part.value is not None else "required"
            yield part.target.id, f"`{ast.unparse(part.annotation)}`".replace("|", "\\|"), shown(default), one_line(str(meaning))


def shown(default: str) -> str:
    """A default as users write it."""
    if default == "required" or default.startswith("field(init=False"):
        return default
    if default.startswith("field(default_factory="):
        return "`{}`" if "dict" in default else "random"
    return f"`{default}`"


def docstring(node: ast.ClassDef) -> str:
    return one_line(ast.get_docstring(node) or "")


def one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
