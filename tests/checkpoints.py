"""Checkpoints that differ in their weights alone."""

import json
from pathlib import Path

from kvferry.engine.make_model.writer import MARKER, make_model

__all__ = ["put_checkpoint"]


def put_checkpoint(path: Path, seed: int) -> None:
    """Write a checkpoint of the same configuration with other weights for each seed, in the place
    of the one that is there.
    """
    make_model(path, seed=seed)
    config = json.loads((path / "config.json").read_text())
    # The configuration alone would show that this is another checkpoint.
    config[MARKER]["seed"] = 0
    (path / "config.json").write_text(json.dumps(config))
