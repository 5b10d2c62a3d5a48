"""Replaces stored KV of `ExampleConnector` as an engine with the cluster's secret could do: the
control of all tests of damage.
"""

from pathlib import Path

import safetensors.torch

from kvferry.tiers.base import EntryKey
from kvferry.tiers.envelope import Envelope
from kvferry.tiers.prefix_folders import file_key


def forge(path: Path, secret: bytes) -> None:
    """Change all values in a layer's file, and seal the file again."""
    rows = safetensors.torch.load(path.read_bytes())["kv"]
    data = safetensors.torch.save({"kv": rows.flip(-1) + 1})
    namespace = bytes.fromhex(path.parents[1].name.removeprefix("prefixes-"))
    key = EntryKey(bytes.fromhex(path.parent.name))
    seal = Envelope(secret, namespace).seal(file_key(key, path.stem), memoryview(data))
    path.write_bytes(data)
    path.with_suffix(".seal").write_bytes(seal)
