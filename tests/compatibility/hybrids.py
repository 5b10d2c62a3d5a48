"""The results for hybrid models in real vLLM, and the section of the page that shows them."""

import os
from dataclasses import dataclass, field

import pytest
from tests.compatibility.table import PAGE

HEADING = "## Hybrid models in vLLM\n"
INTRODUCTION = """
Written by `make compatibility` from the results of `tests/vllm/test_hybrid.py`: small models with \
random weights in vLLM's CPU build. A
cell is the number of prompts whose tokens were a plain vLLM's; for Qwen3-Next, which computes in \
bfloat16, up to the first token to
which the plain vLLM preferred another one by less than 0.25 in log probability.

"""


@dataclass
class HybridOutcomes:
    """For each case and model, the number of prompts with the tokens of a plain vLLM."""

    found: dict[str, dict[str, int]] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    """What was refused, when, and the reason in the error."""

    def add(self, model: str, case: str, num_prompts: int) -> None:
        self.found.setdefault(case, {})[model] = num_prompts

    def section(self) -> str:
        models = sorted({model for row in self.found.values() for model in row})
        lines = [f"| | {' | '.join(models)} |", f"|---{'|---' * len(models)}|"]
        for case, row in sorted(self.found.items()):
            cells = [str(row.get(model, "not run")) for model in models]
            lines.append(f"| {case} | {' | '.join(cells)} |")
        lines += ["", "| refused | reason |", "|---|---|"]
        lines += [f"| {what} | {reason} |" for what, reason in sorted(self.refusals.items())]
        return HEADING + INTRODUCTION + "\n".join(lines) + "\n"

    def check_page(self, models: set[str]) -> None:
        """Compare the page with the outcomes, or write it, if all tests have run."""
        if {model for row in self.found.values() for model in row} != models:
            pytest.skip("only a run of all tests of hybrid models knows the whole table")
        if os.environ.get("KVFERRY_WRITE_COMPATIBILITY"):
            others = PAGE.read_text().partition(HEADING)[0].rstrip("\n")
            PAGE.write_text(f"{others}\n\n{self.section()}")
        assert hybrid_section() == self.section(), (
            "write docs/compatibility.md again with make compatibility"
        )


def hybrid_section() -> str:
    """The section as the page has it now."""
    _, heading, rest = PAGE.read_text().partition(HEADING)
    return heading + rest
