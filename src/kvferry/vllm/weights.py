"""A cheap fingerprint of weights: two fine-tunes of one architecture have equal configurations but
different KV.

The fingerprint samples every tensor, so a tensor that was replaced in one layer is seen. Small
tensors, such as norms, biases and the scales of a quantised KV cache, are read whole. Files whose
format has no table of tensors at the start are cut into equal pieces, and every piece is sampled.
Weights that are not local files, because a loader streams them, are compared by their address, or
by hub name and revision.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError

__all__ = ["find_model", "sample_weights"]

PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
PATTERNS_OF_FORMATS = {
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
}
"""The files that vLLM loads for a `--load-format`; the first pattern that some file matches."""
MAX_READS = 65_536
"""About how many samples are read from all tensors together; from each tensor at least one."""
MAX_SAMPLES_PER_TENSOR = 16
SAMPLE_BYTES = 4096
WHOLE_TENSOR_BYTES = 64 * 1024
MIN_PIECE_BYTES = 256 * 1024
MAX_HEADER_BYTES = 100 * 1024 * 1024

_log = logging.getLogger(__name__)


def sample_weights(
    model: str, revision: str | None, download_dir: str | None = None, load_format: str = "auto"
) -> str:
    """A digest of the weight files, or the model's global name if there are no files to read."""
    folder = find_model(model, revision, download_dir)
    if folder is None:
        _log.warning(
            "weights cannot be sampled, so models are compared by name model=%s revision=%s",
            model,
            revision,
        )
        return f"{model}@{revision}"
    # vLLM prefers these files where a hub repository has both kinds.
    is_hub_name = load_format == "auto" and not Path(model).exists()
    if is_hub_name and any(folder.glob("consolidated*.safetensors")):
        load_format = "mistral"
    return _digest(folder, load_format)


def find_model(model: str, revision: str | None, download_dir: str | None) -> Path | None:
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


def _weight_files(folder: Path, load_format: str = "auto") -> list[Path]:
    if folder.is_file():
        return [folder]
    kind = "consolidated" if load_format == "mistral" else "model"
    index = folder / f"{kind}.safetensors.index.json"
    if index.exists() and load_format not in ("npcache", "pt"):
        return [
            folder / name
            for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))
        ]
    for pattern in PATTERNS_OF_FORMATS.get(load_format, PATTERNS):
        files = sorted(folder.glob(pattern))
        if files:
            return files
    return []


def _digest(folder: Path, load_format: str = "auto") -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        files = _weight_files(folder, load_format)
        if not files:
            raise ConfigError(
                f"{folder} holds no weights to compare with a peer's ({', '.join(PATTERNS)})"
            )
        # In the order of names, so that the same weights in other files have the same digest.
        parts = sorted(part for path in files for part in _parts(path))
        num_samples = min(max(1, MAX_READS // max(1, len(parts))), MAX_SAMPLES_PER_TENSOR)
        with ExitStack() as closing:
            opened = {path: closing.enter_context(path.open("rb")).fileno() for path in files}
            for part in parts:
                digest.update(f"{part.name}\0{part.size_bytes}\0".encode())
                for start, length in _samples(part.size_bytes, num_samples):
                    digest.update(os.pread(opened[part.path], length, part.offset + start))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the weights in {folder} cannot be read, to compare them with a peer's: {error}"
        ) from error
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """A tensor of a weight file, or a piece of a file in which tensors cannot be found."""

    name: str
    path: Path
    offset: int
    size_bytes: int


def _parts(path: Path) -> Iterator[_Part]:
    file_bytes = path.stat().st_size
    if path.suffix != ".safetensors":
        step = max(MIN_PIECE_BYTES, -(-file_bytes // MAX_READS))
        for start in range(0, file_bytes, step):
            yield _Part(f"{path.name} {start:015}", path, start, min(step, file_bytes - start))
        return
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(file.read(header_bytes))
    for name, tensor in header.items():
        if name != "__metadata__":
            start, end = tensor["data_offsets"]
            if not 0 <= start <= end <= file_bytes - 8 - header_bytes:
                raise ValueError(f"tensor {name} lies outside of {path.name}")
            full_name = f"{name} {tensor['dtype']} {tensor['shape']}"
            yield _Part(full_name, path, 8 + header_bytes + start, end - start)


def _samples(size_bytes: int, num_samples: int) -> list[tuple[int, int]]:
    """Return (start, length) of the byte ranges that are hashed: all bytes of a small part, else
    evenly spaced samples that leave out both ends.
    """
    if size_bytes <= WHOLE_TENSOR_BYTES:
        return [(0, size_bytes)]
    step = size_bytes // num_samples
    return [
        (index * step + (step - SAMPLE_BYTES) // 2, SAMPLE_BYTES) for index in range(num_samples)
    ]
