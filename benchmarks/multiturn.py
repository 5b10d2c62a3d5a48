"""`python -m benchmarks multiturn` measures the time to the first token of each turn.

Two fleets of embedded engines run side by side, each with prefill engines, a decode engine and a
router as processes. The fleets differ only in `bidirectional_kv_xfer`, that is, in whether P reuses
the turn that D has retained. Both fleets get the same conversations, turn by turn, and must give
the same answers. P computes less if P still has a prefix cached, so two arrangements are measured:
two prefill engines with prefix caching that get turns alternately, and one prefill engine without
prefix caching.
"""

import argparse
import json
import os
import platform
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.bench.figures import quantile, ratio, rounded
from kvferry.bench.vllm.client import VllmConnection
from kvferry.bench.vllm.servers import COUNT
from kvferry.cli.arguments import Parser
from kvferry.cli.cluster.http_client import is_healthy
from kvferry.cli.cluster.local_cluster import child_environment
from kvferry.cli.cluster.processes import ChildProcess, ProcessGroup
from kvferry.cli.runtime import stop_signals
from kvferry.engine.make_model.writer import make_model
from kvferry.errors import KVFerryError, TransportError
from kvferry.types import Address

# -- fleets --
# The processes of a fleet and the requests to a fleet. All calls block and have a timeout. However
# the benchmark ends, no process is left behind (see `kvferry.cli.cluster.processes`).


LOOPBACK = "127.0.0.1"
MODEL_NAME = "tiny"
NOWHERE = Address(LOOPBACK, 0)
START_S = 240.0
POLL_INTERVAL_S = 0.1
CLOSE_TIMEOUT_S = 15.0
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_MOVED = "kvferry:transfer_bytes_total"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The prefill engines in front of the one decode engine of a fleet."""

    prefill_engines: int
    prefix_caching: bool
    """Whether the prefill engines cache prefixes."""

    def __str__(self) -> str:
        engines = (
            "one prefill engine"
            if self.prefill_engines == 1
            else f"{self.prefill_engines} prefill engines in turn"
        )
        return f"{engines}, {'with' if self.prefix_caching else 'without'} prefix cache"


@dataclass(frozen=True, slots=True)
class PrefillCounts:
    """The counters of all prefill engines so far: prompt tokens by source of their KV, and fetched
    bytes.
    """

    computed: int
    cached: int
    pulled: int
    pulled_bytes: int

    def since(self, before: "PrefillCounts") -> "PrefillCounts":
        return PrefillCounts(
            self.computed - before.computed,
            self.cached - before.cached,
            self.pulled - before.pulled,
            self.pulled_bytes - before.pulled_bytes,
        )


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The answer to one turn."""

    ttft_s: float
    token_ids: list[int]


@dataclass(slots=True)
class BenchFleet:
    """The addresses of one fleet, and requests to the fleet."""

    arrangement: Arrangement
    reuse: bool
    prefill: list[Address] = field(default_factory=list)
    decode: list[Address] = field(default_factory=list)
    router: Address = NOWHERE

    def ask(self, conversation: str, prompt: Sequence[int], answer_tokens: int) -> TurnAnswer:
        """Send one turn as a stream; the time to first token ends at the first event with a
        token.
        """
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        body |= {"stream": True, "return_token_ids": True, "conversation_id": conversation}
        tokens: list[int] = []
        with VllmConnection(self.router) as connection:
            since = time.perf_counter()
            first: float | None = None
            for line in connection.post(body):
                found = _token_ids(line)
                if found and first is None:
                    first = time.perf_counter() - since
                tokens += found
        if first is None or len(tokens) != answer_tokens:
            raise KVFerryError(
                f"a turn of {len(prompt)} tokens was answered with {len(tokens)} tokens instead "
                f"of {answer_tokens}"
            )
        return TurnAnswer(first, tokens)

    def counts(self) -> PrefillCounts:
        """Read the counters of all prefill engines from /metrics."""
        tokens = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        moved = 0
        for address in self.prefill:
            with VllmConnection(address) as connection:
                text = connection.get("/metrics").decode()
            for sample in (
                sample
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ):
                if sample.name == _BY_SOURCE:
                    tokens[sample.labels["source"]] += int(sample.value)
                elif sample.name == _MOVED:
                    moved += int(sample.value)
        return PrefillCounts(
            tokens["local_compute"],
            tokens["local_cache_hit"],
            tokens["external_kv_transfer"],
            moved,
        )


@contextmanager
def start_fleets(
    model: Path, arrangement: Arrangement, transport: str
) -> Iterator[dict[bool, BenchFleet]]:
    """Start two fleets that differ only in reuse of the turn that D has retained; the key is
    reuse.
    """
    directory = Path(tempfile.gettempdir()) / f"kvferry-multiturn-{secrets.token_hex(8)}"
    given = {name: value for name, value in os.environ.items() if name != "KVFERRY_SECRET_FILE"}
    environment = child_environment(
        {**given, "KVFERRY_SECRET": secrets.token_hex(32)}, directory / "unused"
    )
    fleets = {reuse: BenchFleet(arrangement, reuse) for reuse in (False, True)}
    processes: list[ChildProcess] = []
    with ProcessGroup(directory) as group:

        def start(name: str, command: list[str]) -> ChildProcess:
            processes.append(ChildProcess(name, command, environment))
            processes[-1].start(group.id)
            return processes[-1]

        try:
            engines = {
                reuse: _start_engines(fleet, model, transport, start)
                for reuse, fleet in fleets.items()
            }
            for reuse, fleet in fleets.items():
                addresses = [_wait_healthy(process) for process in engines[reuse]]
                fleet.prefill, fleet.decode = addresses[:-1], addresses[-1:]
                fleet.router = _wait_healthy(start(f"router, reuse {reuse}", _router(fleet)))
            yield fleets
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in reversed(processes):
                process.close(CLOSE_TIMEOUT_S)


def _start_engines(
    fleet: BenchFleet, model: Path, transport: str, start: Callable[[str, list[str]], ChildProcess]
) -> list[ChildProcess]:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "transports": [transport],
            "bidirectional_kv_xfer": fleet.reuse,
        },
    }
    command = [
        sys.executable,
        "-m",
        "kvferry",
        "serve",
        str(model),
        "--host",
        LOOPBACK,
        "--port",
        "0",
        "--served-model-name",
        MODEL_NAME,
    ]
    command += ["--drain-timeout", "0", "--kv-transfer-config", json.dumps(transfer)]
    caching = [] if fleet.arrangement.prefix_caching else ["--no-enable-prefix-caching"]
    prefill = [
        start(f"prefill-{i}, reuse {fleet.reuse}", command + caching)
        for i in range(fleet.arrangement.prefill_engines)
    ]
    return [*prefill, start(f"decode, reuse {fleet.reuse}", command)]


def _router(fleet: BenchFleet) -> list[str]:
    # Turns alternate between the prefill engines, as in a large fleet, so P rarely has the earlier
    # turn cached.
    command = [
        sys.executable,
        "-m",
        "kvferry",
        "proxy",
        "--host",
        LOOPBACK,
        "--port",
        "0",
        "--prefill-policy",
        "round_robin",
    ]
    for role, addresses in (("prefiller", fleet.prefill), ("decoder", fleet.decode)):
        command += [f"--{role}-hosts", *(address.host for address in addresses)]
        command += [f"--{role}-ports", *(str(address.port) for address in addresses)]
    return command


def _wait_healthy(process: ChildProcess) -> Address:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            address = process.poll_address()
        except KVFerryError as error:
            raise KVFerryError(
                "\n".join(
                    [f"{error}; last log lines:", *(f"  {line}" for line in process.tail(40))]
                )
            ) from None
        if address is not None and is_healthy(address):
            return address
        time.sleep(POLL_INTERVAL_S)
    raise KVFerryError(f"{process.name} did not become healthy within {START_S:g} s")


def _token_ids(line: bytes) -> list[int]:
    """Return the token ids of one event; empty if the event has no choice.

    Raise TransportError for an error in the middle of the stream.
    """
    if not line.startswith(b"data: {"):
        return []
    event = json.loads(line.removeprefix(b"data: "))
    if "error" in event:
        raise TransportError(f"a turn was aborted: {event['error']}")
    return [token for choice in event.get("choices", []) for token in choice.get("token_ids") or []]


# -- command --


DESCRIPTION = (
    "Measure the time to the first token of every turn of a conversation with embedded engines "
    "behind the router, with and without\nreuse of the decode engine's blocks of earlier turns; "
    "and count the tokens that the prefill engines computed and fetched for it."
)
EXAMPLES = """\
  python -m benchmarks multiturn
  python -m benchmarks multiturn --json --conversations 10 --first-tokens 4096"""
ARRANGEMENTS = (Arrangement(2, prefix_caching=True), Arrangement(1, prefix_caching=False))
SEED = 1
VOCABULARY = range(10, 500)
WARM_UPS = 1
"""The number of conversations that are not counted; in these, engines and router connect to each
other.
"""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of one conversation, in turns and tokens."""

    turns: int
    first_tokens: int
    """The tokens of the first prompt."""
    user_tokens: int
    """The tokens that every further turn adds to the conversation."""
    answer_tokens: int

    @property
    def total(self) -> int:
        return (
            self.first_tokens
            + (self.turns - 1) * self.user_tokens
            + self.turns * self.answer_tokens
        )


@dataclass(frozen=True, slots=True)
class TurnSample:
    """The measurement of one turn."""

    arrangement: Arrangement
    reuse: bool
    number: int
    """The number of the turn, from 1."""
    prompt_tokens: int
    ttft_s: float
    counts: PrefillCounts


def add_arguments(parser: Parser) -> None:
    for flag, default, what in (
        ("conversations", 5, "conversations in each arrangement"),
        ("turns", 6, "turns of a conversation"),
        ("first-tokens", 1024, "tokens of the first prompt"),
        ("user-tokens", 128, "tokens that every further turn adds"),
        ("answer-tokens", 64, "tokens of every answer"),
    ):
        parser.add_argument(
            f"--{flag}",
            type=COUNT,
            default=default,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    help_text = (
        "prefix cache of prefill engines: on (2 in turn), off (1) or both, one after the other "
        "(default: %(default)s)"
    )
    parser.add_argument(
        "--prefix-caching", default="both", choices=("on", "off", "both"), help=help_text
    )
    parser.add_argument(
        "--transport",
        default="shm",
        choices=("shm", "nixl", "tcp"),
        help="data transport (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output"
    )


def run(arguments: argparse.Namespace) -> int:
    lengths = Lengths(
        arguments.turns, arguments.first_tokens, arguments.user_tokens, arguments.answer_tokens
    )
    turns: list[TurnSample] = []
    with stop_signals(), tempfile.TemporaryDirectory(prefix="kvferry-multiturn-") as directory:
        model = Path(directory) / "model"
        _make_model(model, lengths.total)
        for arrangement in ARRANGEMENTS:
            if arguments.prefix_caching != "both" and arrangement.prefix_caching != (
                arguments.prefix_caching == "on"
            ):
                continue
            print(f"{arrangement}: starting", file=sys.stderr, flush=True)
            with start_fleets(model, arrangement, arguments.transport) as fleets:
                turns += _measure(fleets, lengths, arguments.conversations)
    rows = make_rows(turns)
    facts = {
        **asdict(lengths),
        "conversations": arguments.conversations,
        "transport": arguments.transport,
        "machine": _machine(),
    }
    print(json.dumps({**facts, "rows": rows}) if arguments.json else _table(rows))
    return 0


def _make_model(directory: Path, length: int) -> None:
    """Write a tiny model with enough positions for the conversations."""
    make_model(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], length)
    path.write_text(json.dumps(config))


def _measure(
    fleets: Mapping[bool, BenchFleet], lengths: Lengths, conversations: int
) -> list[TurnSample]:
    rng = random.Random(SEED)
    turns: list[TurnSample] = []
    for number in range(-WARM_UPS, conversations):
        samples = _run_conversation(fleets, lengths, rng)
        if number >= 0:
            turns += samples
            print(f"conversation {number + 1} of {conversations}", file=sys.stderr, flush=True)
    return turns


def _run_conversation(
    fleets: Mapping[bool, BenchFleet], lengths: Lengths, rng: random.Random
) -> list[TurnSample]:
    """Run one conversation with both fleets; the answers must be equal."""
    name = secrets.token_hex(8)
    prompt = rng.choices(VOCABULARY, k=lengths.first_tokens)
    turns = []
    for number in range(1, lengths.turns + 1):
        answers = []
        # A random order, so that neither fleet always runs after the other fleet.
        for reuse in rng.sample(sorted(fleets), k=len(fleets)):
            fleet = fleets[reuse]
            before = fleet.counts()
            turn_answer = fleet.ask(name, prompt, lengths.answer_tokens)
            turns.append(
                TurnSample(
                    fleet.arrangement,
                    reuse,
                    number,
                    len(prompt),
                    turn_answer.ttft_s,
                    fleet.counts().since(before),
                )
            )
            answers.append(turn_answer.token_ids)
        if any(answer != answers[0] for answer in answers):
            raise KVFerryError(
                f"turn {number} was answered differently with and without reuse: the reused KV is "
                "wrong"
            )
        prompt = [*prompt, *answers[0], *rng.choices(VOCABULARY, k=lengths.user_tokens)]
    return turns


def make_rows(turns: Sequence[TurnSample]) -> list[dict[str, Any]]:
    """Return one row per arrangement, turn and reuse."""
    groups: dict[tuple[Arrangement, int, bool], list[TurnSample]] = {}
    for turn in turns:
        groups.setdefault((turn.arrangement, turn.number, turn.reuse), []).append(turn)
    order = sorted(groups, key=lambda key: (-key[0].prefill_engines, key[1], key[2]))
    return [_row(arrangement, number, reuse, groups) for arrangement, number, reuse in order]


def _row(
    arrangement: Arrangement,
    number: int,
    reuse: bool,
    groups: Mapping[tuple[Arrangement, int, bool], Sequence[TurnSample]],
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
    """Return the median as a counted value: of an even number of values, the smaller of the middle
    two.
    """
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
    return "\n".join(
        [
            *lines[1:],
            "",
            "time to the first token of a turn, through the router; tokens and bytes are those of "
            "the prefill engines",
        ]
    )


def _field(value: object) -> str:
    return (
        {True: "yes", False: "no", None: "-"}.get(value, str(value))
        if value is None or isinstance(value, bool)
        else str(value)
    )
