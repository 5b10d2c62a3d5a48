"""Parses the commands in docs/, so that the tests run what operators copy."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.vllm.fleet import ROOT


@dataclass(frozen=True)
class Documented:
    """One command: the variables set before it, its words, and its `--kv-transfer-config`, if
    any.
    """

    environment: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def transfer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.words[self.words.index("--kv-transfer-config") + 1])
        return found


def documented(section: str, page: str = "vllm.md") -> list[Documented]:
    """Return the commands of one section, in the order of the page."""
    text = (
        (ROOT / "docs" / page)
        .read_text(encoding="utf-8")
        .split(f"## {section}\n")[1]
        .split("\n## ")[0]
    )
    return [
        _take_apart(shlex.split(block.replace("\\\n", " "))) for block in text.split("```")[1::2]
    ]


def _take_apart(words: list[str]) -> Documented:
    start = next(index for index, word in enumerate(words) if "=" not in word)
    return Documented(dict(word.split("=", 1) for word in words[:start]), tuple(words[start:]))
