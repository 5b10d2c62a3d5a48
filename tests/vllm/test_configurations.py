"""Fuzzes pairs of vLLM servers with different configurations: D's tokens are those that D computes
alone, or D refuses the pair and names the field that differs.

`make test-all` runs all pairs of some random configurations, and the negative control, in which one
factor is not compared:

    .venv/bin/python -m pytest --exhaustive -q tests/vllm/test_configurations.py
"""

import asyncio
import json
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from itertools import permutations
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.e2e.harness import PREFILL_PARAMS, Engine, Prompt, ask, metrics, new_session
from tests.vllm.fleet import BY_MODULE_PATH, Fleet, ready

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3000)]

HALF_HEAD = 32
ORIGINAL_LENGTH = 1024
LOG_S = 10.0
STARTED_AT_ONCE = 4
ROPES: dict[str, dict[str, Any] | None] = {
    "": None,
    "theta": {"rope_type": "default", "rope_theta": 5000},
    "linear": {"rope_type": "linear", "rope_theta": 10000, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000,
        "short_factor": [1.0] * HALF_HEAD,
        "long_factor": [8.0] * HALF_HEAD,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}
MODELS = ("tiny", "copied", "replaced", "quantised")
"""The generated model; the same in other files, written by another version of Transformers; the
same with another v_proj in one layer; and with weights and activations of 8 bits.
"""
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**INT8, "strategy": "token", "dynamic": True},
        }
    },
}
ADAPTER, ADAPTER_RANK = "adapter", 8
ADAPTERS = {"french": (0, 8), "german": (1, 8), "strong-french": (0, 16)}
"""The seed of an adapter's weights, and its `lora_alpha`: one differs in the latter only."""


@dataclass(frozen=True)
class Configuration:
    """The settings of one server. All others are equal."""

    rope: str = ""
    max_model_len: int = 2048
    model: str = "tiny"
    rms_norm_eps: float | None = None
    dtype: str = "float32"
    block_size: int = 32
    adapter: str = ""
    """The LoRA adapter that this server has under the name `ADAPTER`."""
    flags: tuple[str, ...] = ()
    """Options that do not change KV."""

    def arguments(self, folders: dict[str, Path]) -> list[str]:
        overrides: dict[str, Any] = {}
        if self.rope:
            overrides["rope_parameters"] = ROPES[self.rope]
        if self.rms_norm_eps:
            overrides["rms_norm_eps"] = self.rms_norm_eps
        return [
            *("--max-model-len", str(self.max_model_len)),
            *("--dtype", self.dtype),
            *("--block-size", str(self.block_size)),
            *("--num-gpu-blocks-override", "160"),
            *(("--hf-overrides", json.dumps(overrides)) if overrides else ()),
            *(("--enable-lora", "--lora-modules") if self.adapter else ()),
            *((f"{ADAPTER}={folders[self.adapter]}",) if self.adapter else ()),
            *self.flags,
        ]

    def factors(self) -> dict[str, object]:
        """What P and D must have in common, by the names that a refusal may give."""
        is_long = self.max_model_len > ORIGINAL_LENGTH
        return {
            r"config\.rope|max_model_len": self.rope,
            "max_model_len": is_long if self.rope == "longrope" else None,
            r"weights|quantization|config\.quantization_config": self.model.replace(
                "copied", "tiny"
            ),
            r"config\.rms_norm_eps": self.rms_norm_eps,
            "dtype|cache_dtype": self.dtype,
            "block_size|block_bytes|regions|order within": self.block_size,
        }


def random_configuration(rng: random.Random) -> Configuration:
    """A configuration that differs from the default in one to three settings."""
    choices: dict[str, Sequence[Any]] = {
        "rope": list(ROPES)[1:],
        "max_model_len": (1024, 1536),
        "model": MODELS[1:],
        "adapter": list(ADAPTERS),
        "rms_norm_eps": (0.01,),
        "dtype": ("bfloat16",),
        "block_size": (64,),
        "flags": (
            ("--no-enable-prefix-caching",),
            ("--seed", "7", "--max-num-batched-tokens", "256"),
            ("--no-async-scheduling",),
        ),
    }
    # LongRoPE depends on a second option, so it is chosen more often.
    settings: dict[str, Any] = {"rope": "longrope"} if rng.random() < 0.3 else {}
    for name in rng.sample(sorted(choices), rng.randint(1, 3)):
        settings.setdefault(name, rng.choice(choices[name]))
    if settings.get("model") == "quantised":
        settings["adapter"] = ""  # vLLM's CPU build cannot combine the two
    return Configuration(**settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: Path) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("configurations")
    found = {"tiny": model} | {name: directory / name for name in MODELS[1:]}
    for name in MODELS[1:]:
        shutil.copytree(model, found[name])
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (found["copied"] / "config.json").write_text(
        json.dumps(config | {"transformers_version": "4.40.0", "use_cache": False})
    )
    (found["copied"] / "model.safetensors").unlink()
    for part in (0, 1):
        half = dict(list(tensors.items())[part::2])
        save_file(half, found["copied"] / f"model-{part}.safetensors", {"format": "pt"})
    v_proj = "model.layers.1.self_attn.v_proj.weight"
    replaced = tensors | {v_proj: -tensors[v_proj]}
    save_file(replaced, found["replaced"] / "model.safetensors", {"format": "pt"})
    (found["quantised"] / "config.json").write_text(
        json.dumps(config | {"quantization_config": QUANTISATION})
    )
    save_file(quantised(tensors), found["quantised"] / "model.safetensors", {"format": "pt"})
    for name, (seed, alpha) in ADAPTERS.items():
        write_adapter(directory / name, seed, alpha)
    return found | {name: directory / name for name in ADAPTERS}


def quantised(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors with 8 bits per weight of every linear layer, and a scale per row."""
    small: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scales = np.maximum(np.abs(tensor).max(axis=1, keepdims=True), 1e-6) / 127
            small[name] = np.round(tensor / scales).astype(np.int8)
            small[f"{name}_scale"] = scales.astype(np.float32)
        else:
            small[name] = tensor
    return small


def write_adapter(directory: Path, seed: int, alpha: int) -> None:
    directory.mkdir()
    rng = np.random.default_rng(seed)
    names = [f"base_model.model.model.layers.{layer}.self_attn.v_proj" for layer in range(4)]
    a = {f"{name}.lora_A.weight": rng.normal(size=(ADAPTER_RANK, 256)) for name in names}
    b = {f"{name}.lora_B.weight": rng.normal(size=(128, ADAPTER_RANK)) for name in names}
    tensors = {name: part.astype(np.float32) for name, part in (a | b).items()}
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ADAPTER_RANK,
        "lora_alpha": alpha,
        "target_modules": ["v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))


@contextmanager
def servers(
    directory: Path,
    folders: dict[str, Path],
    configurations: Sequence[Configuration],
    module: str = BY_MODULE_PATH["kv_connector_module_path"],
) -> Iterator[list[Engine]]:
    """Start a server per configuration."""
    transfer = {**BY_MODULE_PATH, "kv_connector_module_path": module}
    with ExitStack() as closing:
        fleets: dict[str, Fleet] = {}
        secret: bytes | None = None
        for name in MODELS:
            fleets[name] = closing.enter_context(Fleet(directory / name, folders[name], secret))
            secret = fleets[name].secret
        started = []
        for number, configuration in enumerate(configurations):
            server = fleets[configuration.model].vllm(
                f"server{number}",
                *configuration.arguments(folders),
                transfer=transfer,
                cores=str(number % 2),
            )
            started.append(server)
            if len(started) % STARTED_AT_ONCE == 0:
                ready(*started)
        ready(*started)
        yield started


@dataclass(frozen=True)
class Outcome:
    """How D answered one prompt with KV of P: with right tokens, with wrong ones, or refused."""

    is_right: bool
    refusal: str = ""


async def hand_over(
    session: aiohttp.ClientSession,
    engines: tuple[Engine, Engine],
    prompt: Prompt,
    salts: tuple[str, str] = ("", ""),
    model: str = "tiny",
) -> Outcome:
    """Let P compute the prompt and D continue; compare with what D computes alone. The salt of
    D's own answer keeps its prefix cache apart.
    """
    p, d = engines
    alone = f"alone {time.monotonic_ns()}"
    right = await ask(session, d, prompt, model=model, cache_salt=alone)
    assert right.is_ok, right.body
    at_p, at_d = ({"model": model} | ({"cache_salt": salt} if salt else {}) for salt in salts)
    answer = await ask(session, p, prompt, max_tokens=1, kv_transfer_params=PREFILL_PARAMS, **at_p)
    assert answer.is_ok, answer.body
    params = answer.body["kv_transfer_params"]
    answer = await ask(session, d, prompt, kv_transfer_params=params, **at_d)
    if answer.is_ok:
        return Outcome(answer.token_ids == right.token_ids)
    return Outcome(False, await refusal(d, str(params["remote_engine_id"])))


async def refusal(d: Engine, peer: str) -> str:
    """The fields that D's log names for this peer. A line may arrive after the response."""
    deadline = time.monotonic() + LOG_S
    while time.monotonic() < deadline:
        for line in reversed(d.process.tail(400)):
            if found := re.search(rf"{peer} is not compatible: (.*)", line):
                return found[1]
        await asyncio.sleep(0.1)
    raise AssertionError("\n".join([*d.process.tail(60), f"no refusal of {peer}"]))


def check(p: Configuration, d: Configuration, outcome: Outcome) -> None:
    """Engines that agree must understand each other; others must be refused by a name."""
    ours, theirs = d.factors(), p.factors()
    expected = [name for name in ours if ours[name] != theirs[name]]
    pair = f"P {p}\nD {d}\n{outcome}"
    if outcome.refusal:
        assert expected, f"refused without need\n{pair}"
        for name in re.findall(r"(?:^|; )([^:;]+): ours", outcome.refusal):
            assert re.match("|".join(expected), name), f"{name} does not differ\n{pair}"
    else:
        assert outcome.is_right, f"wrong tokens\n{pair}"
        assert not expected, f"accepted, although {expected} differ\n{pair}"


def random_prompt(rng: random.Random) -> Prompt:
    length = rng.choice((33, 64, 65, 96, 200, 500))
    return Prompt(tuple(rng.randrange(10, 500) for _ in range(length)), 12)


async def check_all(
    configurations: Sequence[Configuration], engines: Sequence[Engine]
) -> Counter[str]:
    rng = random.Random(11)
    outcomes: Counter[str] = Counter()
    async with new_session(120) as session:
        for one, other in permutations(range(len(engines)), 2):
            p, d = configurations[one], configurations[other]
            pair = engines[one], engines[other]
            salts = rng.choice((("", ""), ("a", "a")))
            outcome = await hand_over(session, pair, random_prompt(rng), salts)
            check(p, d, outcome)
            outcomes["refused" if outcome.refusal else "equal"] += 1
            # KV under another salt or adapter is never used, whatever the configurations are.
            outcome = await hand_over(session, pair, random_prompt(rng), ("a", "b"))
            assert outcome.is_right or outcome.refusal, f"wrong salt\nP {p}\nD {d}"
            if p.adapter and d.adapter:
                outcome = await hand_over(session, pair, random_prompt(rng), model=ADAPTER)
                assert outcome.is_right or outcome.refusal, f"wrong adapter\nP {p}\nD {d}"
                outcomes["adapters"] += 1
        loads = [await metrics(session, engine) for engine in engines]
    assert sum(found["kvferry:finished_loads_total"] for found in loads) >= outcomes["equal"] > 0
    return outcomes


LONG = Configuration(rope="longrope", max_model_len=2048)
SHORT = Configuration(rope="longrope", max_model_len=ORIGINAL_LENGTH)


@pytest.mark.exhaustive
def test_a_few_pairs_have_right_tokens_or_are_refused_by_name(
    tmp_path: Path, folders: dict[str, Path]
) -> None:
    few = (LONG, SHORT, Configuration(rope="longrope", max_model_len=1536, model="copied"))
    with servers(tmp_path, folders, few) as engines:
        assert asyncio.run(check_all(few, engines)) == {"equal": 2, "refused": 4}


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_all_pairs_of_random_configurations_have_right_tokens_or_are_refused_by_name(
    tmp_path: Path, folders: dict[str, Path], seed: int
) -> None:
    """56 pairs of servers per seed."""
    rng = random.Random(seed)
    many = [
        Configuration(adapter="french"),
        Configuration(adapter="strong-french", model="copied"),
        Configuration(model="replaced"),
        *(random_configuration(rng) for _ in range(5)),
    ]
    with servers(tmp_path, folders, many) as engines:
        outcomes = asyncio.run(check_all(many, engines))
    assert outcomes["equal"] + outcomes["refused"] == 56
    assert outcomes["adapters"] >= 2


@pytest.mark.exhaustive
def test_without_one_factor_the_tokens_are_wrong(tmp_path: Path, folders: dict[str, Path]) -> None:
    """The negative control: the tokens alone show that a factor is missing."""
    pair = (LONG, SHORT)
    with (
        servers(tmp_path, folders, pair, module="tests.vllm.forgetful") as engines,
        pytest.raises(AssertionError, match="wrong tokens"),
    ):
        asyncio.run(check_all(pair, engines))


def test_every_setting_of_a_configuration_is_known_to_the_check() -> None:
    assert len(Configuration().factors()) == len(fields(Configuration)) - 2
