"""Tests that the states of a model move with its KV: between engines of different forms, and when a
load fails or its request is aborted. A control must differ.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility.engines import LocalEngine, run_all

from kvferry.engine.make_model.writer import make_model
from kvferry.engine.options import EngineOptions
from kvferry.types import KVLayout

pytestmark = pytest.mark.slow

MAX_TOKENS = 12


def random_prompts(count: int) -> list[list[int]]:
    """Return prompts of all lengths from 1 token on, also at the boundaries of blocks."""
    rng = random.Random(3)
    lengths = [1, 2, 3, 4, 16, 17, 18, 32, 33, 34]
    lengths += [rng.randrange(5, 200) for _ in range(count - len(lengths))]
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


PROMPTS = random_prompts(30)
LONG = PROMPTS[-1]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    directory = tmp_path_factory.mktemp("states") / "model"
    make_model(directory, family="hybrid")
    return EngineOptions(directory, num_blocks=400)


@pytest.fixture(scope="module")
def expected(options: EngineOptions, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    plain = LocalEngine(options, "plain", None, tmp_path_factory.mktemp("plain"))
    for index, prompt in enumerate(PROMPTS):
        plain.add(str(index), prompt, MAX_TOKENS)
    run_all([plain], lambda: len(plain.finished) == len(PROMPTS))
    plain.close()
    return [plain.tokens[str(index)] for index in range(len(PROMPTS))]


class Starter:
    """Starts engines and closes them at the end of a test."""

    def __init__(self, options: EngineOptions, directory: Path, closing: ExitStack) -> None:
        self._options = options
        self._directory = directory
        self._closing = closing

    def __call__(
        self,
        name: str,
        transport: str = "shm",
        form: dict[str, Any] | None = None,
        **settings: str,
    ) -> LocalEngine:
        extra = {"transports": [transport], "num_threads": 1, "kv_lease_duration": 600}
        made = LocalEngine(
            replace(self._options, **form or {}), name, extra, self._directory, **settings
        )
        self._closing.callback(made.close)
        return made


@pytest.fixture
def start(options: EngineOptions, tmp_path: Path) -> Iterator[Starter]:
    with ExitStack() as closing:
        yield Starter(options, tmp_path, closing)


def prefill(p: LocalEngine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    for index, prompt in enumerate(prompts):
        p.add(str(index), prompt, 50, {"do_remote_decode": True})
    run_all([p], lambda: len(p.finished) == len(prompts))
    # A prompt of one token leaves nothing to a prefill leg.
    assert {len(p.tokens[str(n)]) for n, prompt in enumerate(prompts) if len(prompt) > 1} == {1}
    return [p.finished[str(index)].kv_transfer_params or {} for index in range(len(prompts))]


def assert_all_free(p: LocalEngine, d: LocalEngine) -> None:
    run_all([p, d], lambda: p.num_used_blocks == d.num_used_blocks == 0)


FORMS: dict[str, dict[str, Any]] = {
    "usual": {},
    "other": {
        "tensor_parallel_size": 2,
        "block_size": 32,
        "kv_cache_layout": KVLayout.NHD,
        "cross_layer_blocks": True,
    },
}


@pytest.mark.parametrize(
    ("transport", "p_form", "d_form"),
    [("shm", "usual", "usual"), ("tcp", "usual", "other"), ("shm", "other", "usual")],
)
def test_tokens_after_a_transfer_are_those_of_a_single_engine(
    start: Starter, expected: list[list[int]], transport: str, p_form: str, d_form: str
) -> None:
    p = start("p", transport, FORMS[p_form])
    d = start("d", transport, FORMS[d_form])
    for index, params in enumerate(prefill(p, PROMPTS)):
        d.add(str(index), PROMPTS[index], MAX_TOKENS, params)
    run_all([p, d], lambda: len(d.finished) == len(PROMPTS))
    for index, prompt in enumerate(PROMPTS):
        output = d.finished[str(index)]
        assert output.error is None, f"{len(prompt)} tokens: {output.error}"
        assert d.tokens[str(index)] == expected[index], f"{len(prompt)} tokens"
        assert output.num_cached_tokens == len(prompt) - 1
    assert_all_free(p, d)


@pytest.mark.parametrize("part", ["recurrent", "conv.x", "conv.B", "conv.C"])
def test_a_wrong_state_on_the_prefill_side_changes_the_tokens(
    start: Starter, expected: list[list[int]], part: str
) -> None:
    """The negative control of the comparisons above."""
    p, d = start("p"), start("d")
    (params,) = prefill(p, [LONG])
    for layer in (0, 2):
        cache = p.kv_caches[f"model.layers.{layer}.mamba.{part}"]
        cache.copy_(cache.flip(1).clone())
    d.add("0", LONG, MAX_TOKENS, params)
    run_all([p, d], lambda: "0" in d.finished)
    assert d.finished["0"].error is None
    assert d.tokens["0"] != expected[-1]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_read_is_an_error_or_is_computed_again(
    start: Starter, expected: list[list[int]], policy: str
) -> None:
    p, d = start("p"), start("d", faults="fail:every=1", policy=policy)
    (params,) = prefill(p, [LONG])
    d.add("0", LONG, MAX_TOKENS, params)
    run_all([p, d], lambda: "0" in d.finished)
    if policy == "fail":
        assert "could not be fetched" in str(d.finished["0"].error)
    else:
        assert d.tokens["0"] == expected[-1]
    assert_all_free(p, d)


def test_an_abort_during_a_load_leaves_no_block_behind(
    start: Starter, expected: list[list[int]]
) -> None:
    p, d = start("p"), start("d", faults="delay:polls=500")
    first, second = prefill(p, [LONG, LONG])
    d.add("0", LONG, MAX_TOKENS, first)
    run_all([p, d], lambda: d.num_loading == 1)
    d.abort("0")
    run_all([p, d], lambda: d.num_used_blocks == 0)
    d.add("1", LONG, MAX_TOKENS, second)
    run_all([p, d], lambda: "1" in d.finished)
    assert d.tokens["1"] == expected[-1]
    assert_all_free(p, d)


def test_a_preempted_sequence_is_computed_again(start: Starter, expected: list[list[int]]) -> None:
    """The cache is too small for all sequences at once."""
    engine = start("small", form={"num_blocks": 24})
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, MAX_TOKENS)
    run_all([engine], lambda: len(engine.finished) == len(PROMPTS))
    assert [engine.tokens[str(index)] for index in range(len(PROMPTS))] == expected
    assert engine.num_used_blocks == 0
