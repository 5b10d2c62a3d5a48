"""`kvferry bench multiturn`: the time to the first token of each turn of a conversation, with and without what D has of the turns before.

Two fleets of embedded engines live side by side, each prefill engines, a decode engine and a router as processes, and differ in
`bidirectional_kv_xfer` alone. The same conversations are held with both, turn by turn, and must get the same answers. What P has to
compute depends on what it still has itself, so two arrangements are measured: two prefill engines that are asked in turn and cache
prefixes, and one that does not.
"""

import argparse
import json
import os
import platform
import random
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.multiturn_fleet import Arrangement, BenchFleet, PrefillCounts, start_fleets
from kvferry.cli.interrupts import stop_signals
from kvferry.cli.parser import Parser
from kvferry.engine.make_model import make_model
from kvferry.errors import ConfigError, KVFerryError

__all__ = ["DESCRIPTION", "EXAMPLES", "Lengths", "TurnSample", "add_arguments", "make_rows", "run"]

DESCRIPTION = (
    "Measure the time to the first token of every turn of a conversation with embedded engines behind the router, with and without the\n"
    "reuse of what the decode engine has of the turns before; and count what the prefill engines computed and fetched for it."
)
EXAMPLES = """\
  kvferry bench multiturn
  kvferry bench multiturn --json --conversations 10 --first-tokens 4096"""
ARRANGEMENTS = (Arrangement(2, prefix_caching=True), Arrangement(1, prefix_caching=False))
SEED = 1
VOCABULARY = range(10, 500)
WARM_UPS = 1
"""Conversations that do not count: everybody meets everybody in them."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one conversation."""

    turns: int
    first_tokens: int
    """Of the first prompt."""
    user_tokens: int
    """That every further turn adds to what was said."""
    answer_tokens: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    @property
    def total(self) -> int:
        return self.first_tokens + (self.turns - 1) * self.user_tokens + self.turns * self.answer_tokens


@dataclass(frozen=True, slots=True)
class TurnSample:
    """One turn as it was measured."""

    arrangement: Arrangement
    reuse: bool
    number: int
    """From 1."""
    prompt_tokens: int
    ttft_s: float
    counts: PrefillCounts


def add_arguments(parser: Parser) -> None:
    for flag, default, what in (
        ("conversations", 5, "held in each arrangement"),
        ("turns", 6, "of a conversation"),
        ("first-tokens", 1024, "of the first prompt"),
        ("user-tokens", 128, "that every further turn adds"),
        ("answer-tokens", 64, "of every answer"),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    help_text = "of prefill engines: on (2 in turn), off (1) or both, one after the other (default: %(default)s)"
    parser.add_argument("--prefix-caching", default="both", choices=("on", "off", "both"), help=help_text)
    parser.add_argument("--transport", default="shm", choices=("shm", "nixl", "tcp"), help="data transport (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def run(arguments: argparse.Namespace) -> int:
    lengths = Lengths(arguments.turns, arguments.first_tokens, arguments.user_tokens, arguments.answer_tokens)
    if arguments.conversations < 1:
        raise ConfigError(f"--conversations must be at least 1, got {arguments.conversations}")
    turns: list[TurnSample] = []
    with stop_signals(), tempfile.TemporaryDirectory(prefix="kvferry-multiturn-") as directory:
        model = Path(directory) / "model"
        _make_model(model, lengths.total)
        for arrangement in ARRANGEMENTS:
            if arguments.prefix_caching != "both" and arrangement.prefix_caching != (arguments.prefix_caching == "on"):
                continue
            print(f"{arrangement}: starting", file=sys.stderr, flush=True)
            with start_fleets(model, arrangement, arguments.transport) as fleets:
                turns += _measure(fleets, lengths, arguments.conversations)
    rows = make_rows(turns)
    facts = {**asdict(lengths), "conversations": arguments.conversations, "transport": arguments.transport, "machine": _machine()}
    print(json.dumps({**facts, "rows": rows}) if arguments.json else _table(rows))
    return 0


def _make_model(directory: Path, length: int) -> None:
    """A tiny one whose positions reach beyond the conversations."""
    make_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], length)
    path.write_text(json.dumps(config))


def _measure(fleets: Mapping[bool, BenchFleet], lengths: Lengths, conversations: int) -> list[TurnSample]:
    rng = random.Random(SEED)
    turns: list[TurnSample] = []
    for number in range(-WARM_UPS, conversations):
        samples = _run_conversation(fleets, lengths, rng)
        if number >= 0:
            turns += samples
            print(f"conversation {number + 1} of {conversations}", file=sys.stderr, flush=True)
    return turns


def _run_conversation(fleets: Mapping[bool, BenchFleet], lengths: Lengths, rng: random.Random) -> list[TurnSample]:
    """One conversation with both fleets. Their answers must be equal."""
    name = secrets.token_hex(8)
    prompt = rng.choices(VOCABULARY, k=lengths.first_tokens)
    turns = []
    for number in range(1, lengths.turns + 1):
        answers = []
        for reuse in rng.sample(sorted(fleets), k=len(fleets)):
            fleet = fleets[reuse]
            before = fleet.counts()
            turn_answer = fleet.ask(name, prompt, lengths.answer_tokens)
            turns.append(TurnSample(fleet.arrangement, reuse, number, len(prompt), turn_answer.ttft_s, fleet.counts().since(before)))
            answers.append(turn_answer.token_ids)
        if any(answer != answers[0] for answer in answers):
            raise KVFerryError(f"turn {number} was answered differently with and without reuse: the KV that was used again is wrong")
        prompt = [*prompt, *answers[0], *rng.choices(VOCABULARY, k=lengths.user_tokens)]
    return turns


def make_rows(turns: Sequence[TurnSample]) -> list[dict[str, Any]]:
    groups: dict[tuple[Arrangement, int, bool], list[TurnSample]] = {}
    for turn in turns:
        groups.setdefault((turn.arrangement, turn.number, turn.reuse), []).append(turn)
    order = sorted(groups, key=lambda key: (-key[0].prefill_engines, key[1], key[2]))
    return [_row(arrangement, number, reuse, groups) for arrangement, number, reuse in order]


def _row(
    arrangement: Arrangement, number: int, reuse: bool, groups: Mapping[tuple[Arrangement, int, bool], Sequence[TurnSample]]
) -> dict[str, Any]:
    turns = groups[arrangement, number, reuse]
    plain = quantile([turn.ttft_s for turn in groups.get((arrangement, number, False), [])], 0.5)
    ttft = [turn.ttft_s for turn in turns]
    return {
        "prefill_engines": arrangement.prefill_engines,
        "prefix_caching": arrangement.prefix_caching,
        "turn": number,
        "reuse": reuse,
        "ttft_p50_ms": _ms(ttft, 0.5),
        "ttft_p90_ms": _ms(ttft, 0.9),
        "of_no_reuse": ratio(quantile(ttft, 0.5), plain),
        "prompt_tokens": turns[0].prompt_tokens,
        "computed_tokens": _middle([turn.counts.computed for turn in turns]),
        "cached_tokens": _middle([turn.counts.cached for turn in turns]),
        "pulled_tokens": _middle([turn.counts.pulled for turn in turns]),
        "pulled_bytes": _middle([turn.counts.pulled_bytes for turn in turns]),
    }


def _ms(values: Sequence[float], share: float) -> float | None:
    found = quantile(values, share)
    return None if found is None else rounded(found * 1000)


def _middle(values: Sequence[int]) -> int:
    """One that was counted: of an even number the smaller of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def _machine() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": rounded(os.getloadavg()[0]),
    }


COLUMNS = {
    "turn": "turn",
    "reuse": "reuse",
    "p50 ms": "ttft_p50_ms",
    "p90 ms": "ttft_p90_ms",
    "÷ without": "of_no_reuse",
    "prompt": "prompt_tokens",
    "P computed": "computed_tokens",
    "P had": "cached_tokens",
    "P fetched": "pulled_tokens",
    "bytes": "pulled_bytes",
}


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines: list[str] = []
    title = ""
    for row in rows:
        arrangement = str(Arrangement(row["prefill_engines"], row["prefix_caching"]))
        if arrangement != title:
            title = arrangement
            lines += ["", title, "".join(f"{column:>12}" for column in COLUMNS)]
        lines.append("".join(f"{_field(row[key]):>12}" for key in COLUMNS.values()))
    return "\n".join([*lines[1:], "", "time to the first token of a turn, through the router; tokens and bytes: of the prefill engines"])


def _field(value: object) -> str:
    return {True: "yes", False: "no", None: "-"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)
