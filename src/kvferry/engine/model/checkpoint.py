"""The weight files of a Hugging Face folder: location and shape of each tensor, and reads of parts.

The folder has one `model.safetensors`, or the shards that `model.safetensors.index.json` names.
Headers are read and checked once; nothing from a file is trusted before the check. Reads files;
keeps no file open.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvferry.engine.model.config import (
    LatentShape,
    ModelConfig,
    StateShape,
    llama_name,
    read_json_object,
    tensor_name,
)
from kvferry.errors import ConfigError
from kvferry.weight_files import digest_files

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a weight file, as described by the checked header."""

    path: Path
    name: str
    dtype: str
    """The format in the spelling of safetensors, such as `F32`."""
    shape: tuple[int, ...]
    offset: int
    """Offset of the first byte in the file."""

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All tensors of a checkpoint, by name."""

    tensors: dict[str, StoredTensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    @property
    def paths(self) -> list[Path]:
        return sorted({tensor.path for tensor in self.tensors.values()})

    def read(
        self, name: str, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """Return a copy of a part of a tensor; only the bytes of this part are read from disk.

        `columns` applies to matrices only.
        """
        stored = self.tensors[name]
        try:
            with safe_open(stored.path, framework="pt") as file:
                view = file.get_slice(stored.name)
                part: torch.Tensor = view[rows, columns] if len(stored.shape) > 1 else view[rows]
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{stored.path}: tensor {stored.name} cannot be read: {error}; copy the "
                "checkpoint again"
            ) from None
        return part

    def with_llama_names(self, architecture: str) -> "Checkpoint":
        """Return the same tensors by the names that Llama gives them."""
        return Checkpoint({llama_name(architecture, n): t for n, t in self.tensors.items()})

    def digest(self) -> str:
        """Return a digest of every byte of the files."""
        return digest_files(self.paths, os.environ)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read every header of the checkpoint in `directory`.

    Raises ConfigError for a file or tensor that is missing, damaged or unsupported.
    """
    index = directory / "model.safetensors.index.json"
    tensors: dict[str, StoredTensor] = {}
    placed = _weight_map(index) if index.exists() else {}
    for path in sorted(
        {directory / shard for shard in placed.values()} or {directory / "model.safetensors"}
    ):
        tensors.update((tensor.name, tensor) for tensor in _read_header(path))
    for name, shard in placed.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ConfigError(
                f"{index} places tensor {name} in {shard}, which does not have it; copy the "
                "checkpoint again"
            )
    return Checkpoint(tensors)


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json_object(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{index}: weight_map must be an object from tensor names to file names")
    for shard in placed.values():
        # A shard must be a plain file name, so that an index cannot point outside its folder.
        if (
            not isinstance(shard, str)
            or Path(shard).name != shard
            or not shard.endswith(".safetensors")
        ):
            raise ConfigError(
                f"{index}: weight_map has {shard!r}, which is not the name of a safetensors file"
            )
    return placed


def _read_header(path: Path) -> Iterator[StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= MAX_HEADER_BYTES else None
        size_bytes = path.stat().st_size
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; copy the whole checkpoint") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is not a safetensors file; copy the checkpoint again")
    for name, entry in header.items():
        if name != "__metadata__":
            yield _stored_tensor(path, name, entry, 8 + length, size_bytes)


def _stored_tensor(
    path: Path, name: str, entry: Any, data_start: int, file_bytes: int
) -> StoredTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_sound = (
            all(type(value) is int and value >= 0 for value in (begin, end, *shape))
            and data_start + end <= file_bytes
        )
    except (TypeError, KeyError, ValueError):
        is_sound = False
    if not is_sound:
        raise ConfigError(
            f"{path}: the header of tensor {name} does not fit the file; copy the checkpoint again"
        )
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(
            f"{path}: tensor {name} has format {dtype}; only unquantised weights "
            f"({', '.join(ELEMENT_BYTES)}) are supported"
        )
    tensor = StoredTensor(path, name, dtype, shape, data_start + begin)
    if end - begin != tensor.size_bytes:
        raise ConfigError(
            f"{path}: tensor {name} has {end - begin} bytes where its shape needs "
            f"{tensor.size_bytes}; copy the checkpoint again"
        )
    return tensor


# -- tensor shapes --
# The tensors that a checkpoint must contain according to its config.json, with their shapes.


IGNORED_TENSORS = ("*.rotary_emb.inv_freq",)
"""Tensors that may be present but are not read.

Old Llama files contain the rotary frequencies, which follow from the configuration.
"""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def check_shapes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ConfigError for the first missing, misshapen or unexpected tensor."""
    expected = {
        tensor_name(config.architecture, name): shape for name, shape in _expected_shapes(config)
    }
    for name, shape in expected.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            raise ConfigError(
                f"{config.directory}: tensor {name} is missing from the weights; copy the whole "
                "checkpoint"
            )
        if stored.shape != shape:
            raise ConfigError(
                f"{stored.path}: tensor {name} has shape {list(stored.shape)} where config.json "
                f"needs {list(shape)}"
            )
    for name in sorted(checkpoint.tensors.keys() - expected.keys()):
        is_tied_copy = name == "lm_head.weight" and config.has_tied_embeddings
        if not is_tied_copy and not any(fnmatch(name, pattern) for pattern in IGNORED_TENSORS):
            raise ConfigError(
                f"{checkpoint.tensors[name].path}: tensor {name} is not part of a "
                f"{config.architecture} as config.json describes it"
            )


def _expected_shapes(config: ModelConfig) -> Shapes:
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.has_tied_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer):
            yield f"model.layers.{layer}.{name}", shape


def _layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    attention, hidden, inner = config.attention, config.hidden_size, config.intermediate_size
    if config.layers[layer].has_state:
        assert config.state is not None
        yield from _state_shapes(config, config.state)
    else:
        yield from (
            _head_shapes(config)
            if attention.latent is None
            else _latent_shapes(config, attention.latent)
        )
        if attention.has_output_bias:
            yield "self_attn.o_proj.bias", (hidden,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.is_gemma:
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (inner, hidden)
    yield "mlp.up_proj.weight", (inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def _head_shapes(config: ModelConfig) -> Shapes:
    attention, hidden = config.attention, config.hidden_size
    for name, count in {
        "q": attention.num_heads,
        "k": attention.num_kv_heads,
        "v": attention.num_kv_heads,
    }.items():
        yield f"self_attn.{name}_proj.weight", (count * attention.head_dim, hidden)
        if attention.has_qkv_bias:
            yield f"self_attn.{name}_proj.bias", (count * attention.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, attention.num_heads * attention.head_dim)
    if attention.has_qk_norm:
        yield "self_attn.q_norm.weight", (attention.head_dim,)
        yield "self_attn.k_norm.weight", (attention.head_dim,)


def _state_shapes(config: ModelConfig, state: StateShape) -> Shapes:
    columns, heads = state.num_columns, (state.num_heads,)
    yield "mamba.in_proj.weight", (state.width + columns + state.num_heads, config.hidden_size)
    yield "mamba.conv1d.weight", (columns, 1, state.kernel)
    if state.has_conv_bias:
        yield "mamba.conv1d.bias", (columns,)
    yield "mamba.A_log", heads
    yield "mamba.D", heads
    yield "mamba.dt_bias", heads
    yield "mamba.norm.weight", (state.width,)
    yield "mamba.out_proj.weight", (config.hidden_size, state.width)


def _latent_shapes(config: ModelConfig, latent: LatentShape) -> Shapes:
    heads, hidden, rank = config.attention.num_heads, config.hidden_size, latent.q_lora_rank
    if rank is None:
        yield "self_attn.q_proj.weight", (heads * latent.query_dim, hidden)
    else:
        yield "self_attn.q_a_proj.weight", (rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield "self_attn.q_b_proj.weight", (heads * latent.query_dim, rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent.width, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent.kv_lora_rank,)
    yield (
        "self_attn.kv_b_proj.weight",
        (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank),
    )
    yield "self_attn.o_proj.weight", (hidden, heads * latent.v_head_dim)
    if config.attention.has_qkv_bias:
        yield "self_attn.kv_a_proj_with_mqa.bias", (latent.width,)
        if rank is not None:
            yield "self_attn.q_a_proj.bias", (rank,)
