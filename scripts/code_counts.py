"""Print how large the package is, how it is cut into files, and how its prose reads.

    python scripts/code_counts.py            the figures, and sizes beside their limits
    python scripts/code_counts.py --json     the same as one JSON object
    python scripts/code_counts.py --check    fail if something is larger than its limit
    python scripts/code_counts.py --lower    lower the limits to what is there now

The limits are in `code_limits.toml`: a change must not exceed `limit`, `budget` is where the tree
shall arrive. Raise a limit by hand, with the reason in the commit.

"Circles": groups of modules that import each other, imports for type checkers included.
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
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "kvferry"
LIMITS = Path(__file__).with_name("code_limits.toml")
LONG_FILE_LINES = 500
MANY_FILES = 14
SHORT_MODULE_LINES = 80
MANY_FIELDS = 12
TOGETHER = {"sizing": "cli", "tracing": "web"}
"""Folders that share a limit with another one."""
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
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object instead of tables")
    add("--check", action="store_true", help="fail if something is larger than its limit")
    add("--lower", action="store_true", help="lower the limits to what is there now")
    options = parser.parse_args()
    modules = read_package(PACKAGE)
    sizes, limits = measure(modules), tomllib.loads(LIMITS.read_text())
    if options.lower:
        LIMITS.write_text(lowered(LIMITS.read_text(), sizes))
        return 0
    if options.check:
        return check(sizes, limits)
    figures = count(modules)
    if options.json:
        print(json.dumps(figures | {"sizes": sizes}))
        return 0
    for name, value in figures.items():
        print(f"{name:<40} {value:>10,}")
    print(f"\n{'size':<40} {'now':>10} {'limit':>10} {'budget':>10}")
    for name, size in sizes.items():
        print(f"{name:<40} {size:>10,} {limits[name]['limit']:>10,} {limits[name]['budget']:>10,}")
    return 0


def check(sizes: dict[str, int], limits: dict[str, dict[str, int]]) -> int:
    """Print what is larger than its limit; 1 if something is."""
    if sizes.keys() != limits.keys():
        odd = ", ".join(sorted(sizes.keys() ^ limits.keys()))
        print(f"{LIMITS.name} and the tree do not name the same things: {odd}")
        return 1
    larger = {name: size for name, size in sizes.items() if size > limits[name]["limit"]}
    for name, size in larger.items():
        print(
            f"{name}: {size:,}, but the limit in {LIMITS.relative_to(ROOT)} is "
            f"{limits[name]['limit']:,}; remove as much elsewhere, or raise the limit and give the "
            "reason in the commit"
        )
    return 1 if larger else 0


def lowered(text: str, sizes: dict[str, int]) -> str:
    """The text of the limits, with every limit that is too high lowered."""
    lines = []
    name = ""
    for line in text.splitlines():
        if line.startswith("["):
            name = line.strip("[]").strip('"')
        key, _, value = line.partition(" = ")
        if key == "limit":
            line = f"limit = {min(int(value), sizes[name])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def measure(modules: list[Module]) -> dict[str, int]:
    """The sizes that have a limit: lines of Python by folder of the package and in all, lines of
    tests, words of docs, and how many places break the rules for files and imports.
    """
    folders = Counter[str]()
    for module in modules:
        top = module.name.split(".")[1]
        folder = TOGETHER.get(top, top) if (PACKAGE / top).is_dir() else "single modules"
        folders[folder] += module.num_lines
    decisions = ROOT / "docs" / "decisions"
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.parent != decisions]
    return {
        "package": sum(folders.values()),
        **dict(sorted(folders.items())),
        "benchmarks in the clone": _num_lines(ROOT / "benchmarks"),
        "tests": _num_lines(ROOT / "tests"),
        "words of pages": _num_words(pages),
        "words of decisions": _num_words(decisions.glob("*.md")),
        "files over 500 lines": sum(module.num_lines > LONG_FILE_LINES for module in modules),
        "folders over 14 files": sum(
            files > MANY_FILES for files in Counter(module.folder for module in modules).values()
        ),
        "circles": len(find_circles(modules)),
    }


def _num_lines(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def _num_words(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().split()) for path in paths)


def find_circles(modules: list[Module]) -> list[set[str]]:
    """Groups of modules of which each can be reached from each by imports."""
    imports: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for importer in module.importers:
            imports[importer].add(module.name)

    def reach(start: str) -> set[str]:
        seen, ahead = set[str](), [start]
        while ahead:
            for name in imports[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    reached = {name: reach(name) for name in imports}
    circles: list[set[str]] = []
    for name, ahead in reached.items():
        if name in ahead and not any(name in circle for circle in circles):
            circles.append({other for other in ahead if name in reached[other]})
    return circles


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
