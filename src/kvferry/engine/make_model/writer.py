"""Writes a tiny checkpoint whose output is sensitive to its KV: one wrong block changes the tokens.

The result is a complete Hugging Face folder that transformers and vLLM load too, except that vLLM's
kernels do not support latents as small as those of `mla`; `hybrid` was tried with transformers
only. Unscaled random weights would not be enough: attention of an untrained model is close to a
plain mean, so the output barely depends on any single token, and greedy decoding soon repeats
itself. `make_model/weights.py` scales the weights so that attention decides the hidden state. The
same seed gives the same bytes on every machine. Writes files; no other effect.
"""

import json
import os
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from kvferry.engine.make_model.tokenizer import (
    BOS_TOKEN,
    CHAT_TEMPLATE,
    END_OF_TURN_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    make_tokenizer_json,
    token_id,
)
from kvferry.engine.make_model.weights import FAMILIES, SIZES, Size, make_config, make_tensors
from kvferry.engine.model.config import read_json_object
from kvferry.errors import ConfigError

MARKER = "kvferry_make_model"
"""The key in config.json that marks a generated folder, which may be overwritten."""


def make_model(
    directory: Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    size: str = "tiny",
    heads: int | None = None,
) -> None:
    """Write the checkpoint; an older generated checkpoint is replaced.

    Any other folder that is not empty is refused. `heads` is the number of attention heads; None
    means the default of the size.
    """
    if family not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    if size not in SIZES:
        raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed must be from 0 to 2**64 - 1, got {seed}")
    shape = (SIZES[size] if heads is None else SIZES[size].with_heads(heads)).for_family(
        FAMILIES[family]
    )
    config = make_config(FAMILIES[family], shape)
    config[MARKER] = {"family": family, "seed": seed, "size": size}
    tensors = dict(make_tensors(FAMILIES[family], shape, seed))
    try:
        _check_directory(directory)
        # Write config.json first, so that a partly written folder is recognised as generated here.
        _write(directory / "config.json", _json(config))
        _write(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
        _write(directory / "tokenizer.json", make_tokenizer_json().encode())
        _write(directory / "tokenizer_config.json", _json(_tokenizer_config(shape)))
        _write(directory / "generation_config.json", _json(_generation_config()))
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None


def _check_directory(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # Hidden files may belong to another process that is generating the same model, or that was
    # killed while doing so.
    if all(path.name.startswith(".") for path in directory.iterdir()):
        return
    path = directory / "config.json"
    if not path.exists() or MARKER not in read_json_object(path):
        raise ConfigError(
            f"{directory} is not empty and was not made by make-model; choose another directory"
        )


def _write(path: Path, content: bytes) -> None:
    """Write the file atomically, so that a starting engine never reads half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _generation_config() -> dict[str, Any]:
    return {
        "bos_token_id": token_id(BOS_TOKEN),
        "eos_token_id": [token_id(EOS_TOKEN), token_id(END_OF_TURN_TOKEN)],
        "pad_token_id": token_id(PAD_TOKEN),
    }


def _tokenizer_config(size: Size) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": PAD_TOKEN,
        "model_max_length": size.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
