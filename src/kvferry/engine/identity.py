"""The identity of a model: two engines with equal identities may use each other's KV. Reads the weights' headers and samples of them."""

import json
from hashlib import blake2b

from kvferry.connectors.contract import ModelIdentity
from kvferry.engine.checkpoint import open_checkpoint
from kvferry.engine.config_keys import read_json_object
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.options import EngineOptions
from kvferry.engine.precision import choose_precision

__all__ = ["model_identity"]

COSMETIC_KEYS = ("_name_or_path", "transformers_version")
"""Of config.json: these say where the file came from, not what the model computes."""


def model_identity(config: ModelConfig, options: EngineOptions) -> ModelIdentity:
    """The fingerprint hashes config.json in canonical form (less its cosmetic keys) and `Checkpoint.digest` of the weights."""
    checkpoint = open_checkpoint(config.directory)
    settings = read_json_object(config.directory / "config.json")
    kept = {key: value for key, value in settings.items() if key not in COSMETIC_KEYS}
    digest = blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
    digest.update(checkpoint.digest().encode())
    precision = choose_precision(options, config.dtype, checkpoint.size_bytes)
    return ModelIdentity(
        architecture=config.architecture,
        fingerprint=digest.hexdigest(),
        num_layers=config.num_layers,
        total_kv_heads=config.attention.num_kv_heads,
        head_dim=config.attention.head_dim,
        dtype=str(precision.weights).removeprefix("torch."),
    )
