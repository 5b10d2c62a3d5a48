"""Checkpoints for tests."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from kvferry.engine.make_model.writer import MARKER, make_model

NUM_ROWS, CHANGED_ROWS = 4096, slice(140, 180)


def put_checkpoint(path: Path, seed: int) -> None:
    """Write a checkpoint in the place of the one that is there. Each seed has other weights in 40
    of the 4,096 rows of the embedding, and the same everywhere else.
    """
    make_model(path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            # No token is chosen from rows of zeros, for which the tokenizer has no text.
            more = np.zeros((NUM_ROWS - len(tensors[name]), tensors[name].shape[1]), np.float32)
            tensors[name] = np.concatenate([tensors[name], more])
    rows = tensors["model.embed_tokens.weight"][CHANGED_ROWS]
    rows[:] = np.random.default_rng(seed).standard_normal(rows.shape, np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config[MARKER]["seed"] = 0
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": NUM_ROWS}))
