"""Tests that any two cache forms of one model give a single engine's tokens, or are refused at the
handshake with the reason.

For each model family and transport, one engine of each form is started; each engine reads from all
others, and all others read from it. The results are the table in docs/compatibility.md; `make
compatibility` writes that page again.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.compatibility.engines import LocalEngine, run_all
from tests.compatibility.table import Form, Outcomes
from tests.sampling import exhaustive, sampled

from kvferry.engine.make_model.writer import make_model
from kvferry.engine.options import EngineOptions
from kvferry.types import KVLayout

pytestmark = pytest.mark.slow

FAMILIES = {"GQA": "qwen3", "MLA": "mla", "sliding windows": "window"}
TRANSPORTS = ("shm", "nixl")
TP_SIZES = (1, 2)
BLOCK_SIZES = (16, 32, 64)
LAYOUTS = ("HND", "NHD", "cross-layer")
MAX_TOKENS = 8
CAPACITY_TOKENS = 4096


FORMS = [Form(*each) for each in itertools.product(TP_SIZES, BLOCK_SIZES, LAYOUTS)]
# Every D reads from engines of all forms. `make test` runs each model family over one transport,
# with a pairwise sample of families and forms of D.
USUAL_TRANSPORT = {"GQA": "nixl", "MLA": "shm", "sliding windows": "nixl"}
CASES = [
    pytest.param(
        (family, transport),
        Form(*form),
        marks=case.marks if transport == USUAL_TRANSPORT[family] else exhaustive,
    )
    for transport in TRANSPORTS
    for case in sampled(tuple(FAMILIES), TP_SIZES, BLOCK_SIZES, LAYOUTS)
    for family, *form in [case.values]
]


def prompts(count: int) -> list[list[int]]:
    """Return prompts longer than the largest block and the window, with lengths at, just below and
    just above block boundaries.
    """
    rng = random.Random(4)
    lengths = [65, 80, 96, 97, 111, 112, 113, 127, 128, 129, 144, 150]
    return [
        [rng.randrange(10, 500) for _ in range(lengths[index % len(lengths)])]
        for index in range(count)
    ]


PROMPTS = prompts(12)


def prompt_of(p: Form, d: Form) -> int:
    return (FORMS.index(p) * 5 + FORMS.index(d)) % len(PROMPTS)


@dataclass(frozen=True)
class House:
    """One engine of each form, and a single engine's answer to each prompt."""

    family: str
    transport: str
    directory: Path
    engines: dict[Form, LocalEngine]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[House]:
    family, transport = request.param
    directory = tmp_path_factory.mktemp("compatibility")
    make_model(directory / "model", family=FAMILIES[family])
    plain = start(directory, Form(1, 16, "HND"), "plain", None)
    for index, prompt in enumerate(PROMPTS):
        plain.add(str(index), prompt, MAX_TOKENS)
    run_all([plain], lambda: len(plain.finished) == len(PROMPTS))
    plain.close()
    engines: dict[Form, LocalEngine] = {}
    try:
        for form in FORMS:
            engines[form] = start(directory, form, str(form), transport)
        yield House(
            family,
            transport,
            directory,
            engines,
            [plain.tokens[str(index)] for index in range(len(PROMPTS))],
        )
    finally:
        # Closing a producer while a peer reads from it is the subject of another test.
        for engine in engines.values():
            engine.close()


def start(directory: Path, form: Form, name: str, transport: str | None) -> LocalEngine:
    options = EngineOptions(
        directory / "model",
        block_size=form.block_size,
        num_blocks=3 * CAPACITY_TOKENS // form.block_size,
        kv_cache_layout=KVLayout.NHD if form.layout == "NHD" else KVLayout.HND,
        tensor_parallel_size=form.tp_size,
        cross_layer_blocks=form.layout == "cross-layer",
        # The same prompt goes to many pairs, and each consumer must fetch it.
        enable_prefix_caching=False,
    )
    extra = {
        "transports": [transport],
        "num_threads": 1,
        "kv_lease_duration": 600,
        "enable_cross_layers_blocks": form.layout == "cross-layer",
    }
    return LocalEngine(options, name, None if transport is None else extra, directory)


def name(value: Form | tuple[str, str]) -> str:
    return " over ".join(value) if isinstance(value, tuple) else str(value)


@pytest.fixture
def twin(house: House, d: Form, tmp_path: Path) -> Iterator[LocalEngine]:
    """A second engine of the consumer's form: an engine cannot read from itself."""
    engine = start(house.directory, d, f"twin-of-{d}", house.transport)
    yield engine
    engine.close()


# Module scope keeps the engines of one house for all its tests.
@pytest.mark.parametrize(("house", "d"), CASES, indirect=["house"], ids=name, scope="module")
def test_what_is_fetched_from_every_form_gives_a_single_engines_tokens(
    house: House, d: Form, twin: LocalEngine, outcomes: Outcomes
) -> None:
    consumer, producers = house.engines[d], house.engines | {d: twin}
    for p, producer in producers.items():
        producer.add(f"for {d}", PROMPTS[prompt_of(p, d)], 1, {"do_remote_decode": True})
    run_all(
        list(producers.values()),
        lambda: all(f"for {d}" in producer.finished for producer in producers.values()),
    )
    for p, producer in producers.items():
        consumer.add(
            f"from {p}",
            PROMPTS[prompt_of(p, d)],
            MAX_TOKENS,
            producer.finished[f"for {d}"].kv_transfer_params,
        )
    run_all([consumer], lambda: all(f"from {p}" in consumer.finished for p in FORMS))
    for p in FORMS:
        output, wanted = consumer.finished[f"from {p}"], house.expected[prompt_of(p, d)]
        assert output.error is None, f"from {p}: {output.error}"
        assert consumer.tokens[f"from {p}"] == wanted, f"from {p}"
        assert output.num_cached_tokens > 0, f"from {p}: nothing was fetched"
        outcomes.add(house.family, house.transport, p, d)
    run_all(
        list(producers.values()),
        lambda: all(producer.num_used_blocks == 0 for producer in producers.values()),
    )
    assert consumer.num_used_blocks == 0
