"""Tests that engines with incompatible caches are refused at the handshake with the field and both
values, and that compatible ones are accepted.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.compatibility.engines import LocalEngine, run_all
from tests.compatibility.table import Outcomes

from kvferry.engine.make_model.writer import make_model
from kvferry.engine.options import EngineOptions

pytestmark = pytest.mark.slow

PROMPT = [10 + (index * 7) % 400 for index in range(100)]
CACHE_DTYPES = ("float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2")
EXTRA = {"transports": ["shm"], "kv_lease_duration": 600}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    directory = tmp_path_factory.mktemp("refusals") / "model"
    make_model(directory)
    return EngineOptions(directory, num_blocks=64)


@contextmanager
def engines(
    directory: Path, **sides: tuple[EngineOptions, dict[str, Any] | None]
) -> Iterator[list[LocalEngine]]:
    with ExitStack() as closing:
        made = []
        for name, (options, extra) in sides.items():
            made.append(LocalEngine(options, name, extra, directory))
            closing.callback(made[-1].close)
        yield made


def fetch(p: LocalEngine, d: LocalEngine) -> str | None:
    """Let P compute a prompt and D fetch it; return D's error, or None."""
    p.add("a", PROMPT, 1, {"do_remote_decode": True})
    run_all([p], lambda: "a" in p.finished)
    d.add("b", PROMPT, 8, p.finished["a"].kv_transfer_params)
    run_all([d], lambda: "b" in d.finished)
    return d.finished["b"].error


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_engines_of_one_cache_dtype_understand_each_other(
    options: EngineOptions, dtype: str, tmp_path: Path
) -> None:
    same = replace(options, kv_cache_dtype=dtype)
    with engines(tmp_path, p=(same, EXTRA), d=(same, EXTRA), plain=(same, None)) as (p, d, plain):
        assert fetch(p, d) is None
        plain.add("b", PROMPT, 8)
        run_all([plain], lambda: "b" in plain.finished)
        assert d.tokens["b"] == plain.tokens["b"]
        assert d.finished["b"].num_cached_tokens == len(PROMPT) - 1


def other_model(directory: Path, config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    make_model(directory / "other", **settings)
    path = directory / "other" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return {"model": directory / "other"}


@pytest.mark.parametrize(
    ("what", "changes", "reason"),
    [
        (
            "`--block-size` 48 and 32: neither divides the other",
            {"block_size": 48},
            "block_size: ours 32, theirs 48",
        ),
        (
            "`--kv-cache-dtype`",
            {"kv_cache_dtype": "fp8"},
            "cache_dtype: ours 'float32', theirs 'float8_e4m3fn'",
        ),
        ("`--dtype`", {"dtype": "float16"}, "dtype: ours 'float32', theirs 'float16'"),
        ("weights", {"seed": 7}, "weights: ours .*, theirs .*"),
        (
            "a setting of config.json",
            {"config": {"rms_norm_eps": 0.01}},
            "config.rms_norm_eps: ours 1e-06, theirs 0.01",
        ),
        (
            "model",
            {"family": "llama"},
            "architecture: ours 'Qwen3ForCausalLM', theirs 'LlamaForCausalLM'",
        ),
    ],
    ids=lambda value: value.split()[0].strip("`") if isinstance(value, str) else None,
)
def test_other_differences_are_refused_by_name(
    options: EngineOptions,
    what: str,
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    outcomes: Outcomes,
) -> None:
    ours = replace(options, block_size=32)
    is_model = not changes.keys() <= {"block_size", "kv_cache_dtype", "dtype"}
    theirs = replace(
        ours, **(other_model(tmp_path, **{"config": {}, **changes}) if is_model else changes)
    )
    with engines(tmp_path, p=(theirs, EXTRA), d=(ours, EXTRA)) as (p, d):
        error = fetch(p, d)
        assert error is not None
        assert d.tokens["b"] == []
        assert re.search(reason, error), error
        outcomes.refusals[what] = f"`{reason.replace('.*', '…')}`"
        assert d.num_used_blocks == 0


def test_one_wrong_byte_changes_the_tokens(options: EngineOptions, tmp_path: Path) -> None:
    """The negative control of all comparisons here: a D that corrupts what it reads answers
    differently.
    """
    with engines(tmp_path, p=(options, EXTRA), plain=(options, None)) as (p, plain):
        d = LocalEngine(options, "d", EXTRA, tmp_path, faults="corrupt:every=1")
        try:
            assert fetch(p, d) is None
            plain.add("b", PROMPT, 8)
            run_all([plain], lambda: "b" in plain.finished)
            assert d.tokens["b"] != plain.tokens["b"]
        finally:
            d.close()
