"""Print how large the package is, how it is cut into files, and how its prose reads.

    python scripts/code_counts.py          a table
    python scripts/code_counts.py --json   one JSON object

"One importer beside it": a module under 80 lines that exactly one other module imports, from the
same folder. Such a module is usually a section of its importer. "Pronouns": the share of words in
docstrings that point at something instead of naming it.
"""

import argparse
import ast
import io
import json
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "kvferry"
SHORT_MODULE_LINES = 80
MANY_FIELDS = 12
PRONOUN = re.compile(
    r"it|its|they|them|those|these|that|who|whoever|somebody|nobody|one|ones|he|his|what|others?"
    r"|such"
)
WORD = re.compile(r"[A-Za-z']+")


@dataclass(slots=True)
class Module:
    """One file of the package, parsed."""

    name: str
    text: str
    tree: ast.Module
    importers: set[str] = field(default_factory=set)

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def folder(self) -> str:
        return self.name.rpartition(".")[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Print the size, structure and prose of the package in figures."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    figures = count(read_package(PACKAGE))
    if parser.parse_args().json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<40} {value:>10,}")
    return 0


def read_package(root: Path) -> list[Module]:
    """Every module with code of its own; `__init__` files that are only a docstring do not
    count.
    """
    modules = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        if path.name == "__init__.py" and len(tree.body) <= 1:
            continue
        parts = path.relative_to(root.parent).with_suffix("").parts
        modules.append(Module(".".join(parts), text, tree))
    _find_importers(modules)
    return modules


def count(modules: list[Module]) -> dict[str, float]:
    words = [
        word
        for module in modules
        for text in _docstrings(module.tree)
        for word in WORD.findall(text.lower())
    ]
    lines = sum(module.num_lines for module in modules)
    comments = sum(_num_comment_lines(module.text) for module in modules)
    folders = Counter(module.folder for module in modules)
    return {
        "modules": len(modules),
        "lines": lines,
        "median lines of a file": statistics.median(module.num_lines for module in modules),
        "files over 600 lines": sum(module.num_lines > 600 for module in modules),
        "largest folder, in files": max(folders.values()),
        "short modules, one importer beside them": sum(_is_section(module) for module in modules),
        "classes over 12 fields": sum(
            _num_fields(node) > MANY_FIELDS for node in _classes(modules)
        ),
        "class names used twice": sum(
            uses > 1 for uses in Counter(node.name for node in _classes(modules)).values()
        ),
        "docstring words": len(words),
        "pronouns among them, %": round(
            100 * sum(bool(PRONOUN.fullmatch(word)) for word in words) / len(words), 1
        ),
        "comment lines, %": round(100 * comments / lines, 1),
        "lines over 100 characters": sum(
            len(line) > 100 for module in modules for line in module.text.splitlines()
        ),
    }


def _find_importers(modules: list[Module]) -> None:
    by_name = {module.name: module for module in modules}
    imported: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    imported[name].add(module.name)
    for name, importers in imported.items():
        if name in by_name:
            by_name[name].importers = importers - {name}


def _is_section(module: Module) -> bool:
    if module.num_lines >= SHORT_MODULE_LINES or len(module.importers) != 1:
        return False
    return next(iter(module.importers)).rpartition(".")[0] == module.folder


def _classes(modules: list[Module]) -> Iterator[ast.ClassDef]:
    for module in modules:
        yield from (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def _num_fields(node: ast.ClassDef) -> int:
    """Annotated fields, and attributes that methods assign to `self`."""
    names = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        if (
            isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and isinstance(item.value, ast.Name)
            and item.value.id == "self"
        ):
            names.add(item.attr)
    return len(names)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of modules, classes and functions, and the strings that describe fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for item in node.body:
                if (
                    isinstance(item, ast.Expr)
                    and isinstance(item.value, ast.Constant)
                    and isinstance(item.value.value, str)
                ):
                    yield item.value.value


def _num_comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type == tokenize.COMMENT and not token.string.startswith("# noqa") for token in tokens
    )


if __name__ == "__main__":
    sys.exit(main())
