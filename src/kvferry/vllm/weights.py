"""A cheap fingerprint of a model's weights: two fine-tunes of one architecture have equal configurations and different KV.

Reads the header and evenly spaced samples of each safetensors file, not the whole: what differs between two sets of weights differs in
most of their bytes. Weights that are not found as local files (streamed or converted by a loader) are told apart by name and revision.
"""

import hashlib
import logging
from pathlib import Path

__all__ = ["sample_weights"]

NUM_SAMPLES = 64
SAMPLE_BYTES = 4096

_log = logging.getLogger(__name__)


def sample_weights(model: str, revision: str | None) -> str:
    """A digest of the weight files, or the model's name where there are none to read."""
    folder = _folder(model, revision)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not files:
        _log.warning("weights cannot be sampled, compared by name instead model=%s revision=%s", model, revision)
        return f"{model}@{revision}"
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        _add_file(digest, path)
    return digest.hexdigest()


def _folder(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True, allow_patterns=["*.safetensors"]))
    except (OSError, ValueError):
        return None


def _add_file(digest: "hashlib.blake2b", path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(index * max(0, size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
