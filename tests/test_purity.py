"""Tests that modules in `protocol/` use no clock, thread, socket, file, random number or log."""

import ast
from pathlib import Path

import pytest

import kvferry

PROTOCOL = Path(kvferry.__file__).parent / "protocol"
PURE_STANDARD = {
    "__future__", "abc", "array", "base64", "binascii", "bisect", "collections", "contextlib",
    "dataclasses", "enum", "functools", "hashlib", "heapq", "hmac",
    "itertools", "math", "operator", "re", "struct", "typing",
}  # fmt: skip
PURE_OTHERS = {"msgspec", "numpy"}
OURS = {"kvferry.protocol", "kvferry.events", "kvferry.errors", "kvferry.types"}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def impurities(source: str) -> list[str]:
    """Return the imports and calls in a module's source that reach outside the module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if not _is_pure(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level or not _is_pure(module):
                found.append("." * node.level + module)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in IMPURE_CALLS
        ):
            found.append(f"{node.func.id}()")
    return found


def _is_pure(module: str) -> bool:
    top = module.split(".")[0]
    return top in PURE_STANDARD | PURE_OTHERS or any(
        module == ours or module.startswith(f"{ours}.") for ours in OURS
    )


@pytest.mark.parametrize("path", sorted(PROTOCOL.rglob("*.py")), ids=lambda path: path.stem)
def test_protocol_modules_reach_nothing_outside(path: Path) -> None:
    assert impurities(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    ["import time", "import os.path", "from threading import Lock", "import random as r",
     "import torch", "from kvferry.transports.base import data",
     "def f():\n    import socket", "import logging", "import zmq", "from asyncio import sleep",
     "import kvferry.config", "print(1)"],
)  # fmt: skip
def test_the_check_sees_what_is_impure(line: str) -> None:
    assert len(impurities(line)) == 1
