"""A cheap fingerprint of weights: two fine-tunes of one architecture have equal configurations but
different KV.

The fingerprint reads evenly spaced samples of the weight files, because two sets of weights differ
in most of their bytes. Small tensors that may be the only difference are read whole: norms, biases
and the scales of a quantised KV cache. Weights that are not local files, because a loader streams
them, are compared by their address, or by hub name and revision.
"""

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from kvferry.errors import ConfigError

__all__ = ["sample_adapter", "sample_weights"]

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
NUM_SAMPLES = 512
MIN_SAMPLES_PER_FILE = 4
SAMPLE_BYTES = 4096
MAX_SMALL_BYTES = 64 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024
SMALL_NAMES = ("norm", "bias", "k_scale", "v_scale", "kv_scale")

_log = logging.getLogger(__name__)


def sample_weights(model: str, revision: str | None, download_dir: str | None = None) -> str:
    """A digest of the weight files, or the model's global name if there are no files to read."""
    folder = _folder(model, revision, download_dir)
    if folder is None:
        _log.warning(
            "weights cannot be sampled, so models are compared by name model=%s revision=%s",
            model,
            revision,
        )
        return f"{model}@{revision}"
    return _digest(folder)


def sample_adapter(path: str) -> str:
    """A digest of a LoRA adapter, or the adapter's path if it is not a local folder. The files are
    read again when one has changed.
    """
    folder = Path(path)
    try:
        stamp = (
            tuple((file.name, file.stat().st_mtime_ns) for file in _weight_files(folder))
            if folder.is_dir()
            else ()
        )
        return _digest_once(folder, stamp) if stamp else path
    except (OSError, ConfigError):
        return path


@lru_cache(maxsize=1024)
def _digest_once(folder: Path, stamp: object) -> str:
    """The digest of a folder, cached until `stamp` (file names and modification times) changes."""
    return _digest(folder)


def _folder(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The folder, or the single file, of the weights; None if `model` is a name that means the same
    on every host.
    """
    if Path(model).exists():
        return Path(model)
    if "://" in model:
        return None
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            local_files_only=True,
            allow_patterns=list(PATTERNS),
        )
    except (OSError, ValueError):
        return None
    return Path(found)


def _weight_files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [
            folder / name
            for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
        ]
    for pattern in PATTERNS:
        files = sorted(folder.glob(pattern))
        if files:
            # Some repositories hold the same weights a second time under this name.
            return [file for file in files if not file.name.startswith("consolidated")] or files
    return []


def _digest(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = _weight_files(folder)
        if not files:
            raise ConfigError(
                f"{folder} holds no weights to compare with a peer's ({', '.join(PATTERNS)})"
            )
        for path in files:
            _add_file(digest, path, max(MIN_SAMPLES_PER_FILE, NUM_SAMPLES // len(files)))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the weights in {folder} cannot be read, to compare them with a peer's: {error}"
        ) from error
    return digest.hexdigest()


def _add_file(digest: "hashlib.blake2b", path: Path, num_samples: int) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        for index in range(num_samples):
            file.seek(index * max(0, size - SAMPLE_BYTES) // (num_samples - 1))
            digest.update(file.read(SAMPLE_BYTES))
        if path.suffix == ".safetensors":
            _add_small_tensors(digest, file)


def _add_small_tensors(digest: "hashlib.blake2b", file: BinaryIO) -> None:
    file.seek(0)
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"{file.name} is not a safetensors file")
    header = json.loads(file.read(header_bytes))
    for name in sorted(header):
        start, end = header[name].get("data_offsets", (0, 0))
        if 0 < end - start <= MAX_SMALL_BYTES and any(word in name for word in SMALL_NAMES):
            file.seek(8 + header_bytes + start)
            digest.update(name.encode() + file.read(end - start))
