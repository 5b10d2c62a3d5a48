"""Writes LoRA adapters for the generated model."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 8
NUM_LAYERS, HIDDEN_SIZE, KV_SIZE = 4, 256, 128
"""Of the generated model `tiny`."""


def write_adapter(
    folder: Path, *, seed: int = 0, alpha: int = 16, use_rslora: bool = False, base: str = "tiny"
) -> Path:
    """Write an adapter that changes the values of every layer, and so their KV. `base` is the name
    that the base model had where the adapter was trained.
    """
    numbers = np.random.default_rng(seed)
    shapes = {"lora_A": (RANK, HIDDEN_SIZE), "lora_B": (KV_SIZE, RANK)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.v_proj.{part}.weight": (
            numbers.standard_normal(shape) / 8
        ).astype(np.float32)
        for layer in range(NUM_LAYERS)
        for part, shape in shapes.items()
    }
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": RANK,
        "lora_alpha": alpha,
        "target_modules": ["v_proj"],
        "use_rslora": use_rslora,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_to_hub_cache(cache: Path, name: str, revision: str, seed: int = 0) -> None:
    """Write an adapter where the model hub's library keeps the newest revision of a repository."""
    repository = cache / f"models--{name.replace('/', '--')}"
    write_adapter(repository / "snapshots" / revision, seed=seed)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
