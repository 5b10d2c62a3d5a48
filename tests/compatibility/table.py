"""The outcome for each pair of cache forms, and the page that shows the outcomes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


@dataclass(frozen=True, order=True)
class Form:
    tp_size: int
    block_size: int
    layout: str

    @property
    def shape(self) -> str:
        """Return block size and layout, without the tensor-parallel size."""
        return f"{self.block_size} {self.layout}"

    def __str__(self) -> str:
        return f"tp{self.tp_size}-{self.block_size}-{self.layout}"


class Outcomes:
    """For each model family and transport, and each pair of producer and consumer: an empty string,
    or the reason why the consumer refused.
    """

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], dict[tuple[Form, Form], str]] = {}
        self.refusals: dict[str, str] = {}
        """The difference between the two engines, and the error of the refused request."""

    def add(self, family: str, transport: str, p: Form, d: Form, refusal: str = "") -> None:
        self.pairs.setdefault((family, transport), {})[p, d] = refusal


INTRODUCTION = """\
# What may differ between two engines

Written by `make compatibility` from the results of `tests/compatibility`, which starts an \
embedded engine of every form, lets every one
fetch from every other, and compares the tokens with a single engine's.
"""

WORDS = """\
Rows are the producer's form, columns the consumer's: tokens per block, and how a block is laid \
out (`HND`, `NHD`, or all layers in one
block). `yes`: a single engine's tokens for every combination of tensor-parallel sizes {sizes} \
on both sides, over {transports}.
"""

REFUSALS = """\
## Refused

A consumer refuses these at the handshake; the request follows `kv_load_failure_policy`, \
and its error ends with the reason.

| what differs | reason |
|---|---|
"""


def page(outcomes: Outcomes) -> str:
    families = sorted({family for family, _ in outcomes.pairs})
    transports = sorted({transport for _, transport in outcomes.pairs}, reverse=True)
    sizes = sorted({p.tp_size for pairs in outcomes.pairs.values() for p, _ in pairs})
    words = WORDS.format(
        sizes=_listed(map(str, sizes)),
        transports=_listed(f"`{transport}`" for transport in transports),
    )
    tables = [
        f"## {family}\n\n"
        f"{_table([pairs for (name, _), pairs in outcomes.pairs.items() if name == family])}"
        for family in families
    ]
    rows = "".join(f"| {what} | {reason} |\n" for what, reason in outcomes.refusals.items())
    return "\n".join([INTRODUCTION, words, *tables, REFUSALS + rows])


def _table(results: list[dict[tuple[Form, Form], str]]) -> str:
    shapes = list(dict.fromkeys(p.shape for p, _ in results[0]))
    lines = [f"| | {' | '.join(shapes)} |", f"|---{'|---' * len(shapes)}|"]
    for row in shapes:
        cells = []
        for column in shapes:
            found = [
                text
                for pairs in results
                for (p, d), text in pairs.items()
                if (p.shape, d.shape) == (row, column)
            ]
            reasons = sorted({text for text in found if text})
            cells.append("yes" if found and not reasons else "; ".join(reasons) or "not run")
        lines.append(f"| **{row}** | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _listed(words: Iterable[str]) -> str:
    return " and ".join(words)
