"""Cache salts of vLLM requests: everything besides the token ids that decides a request's KV.

A tenant's own salt, the version of the weights, the LoRA adapter, images and other media, and
prompt embeddings. Peers exchange KV only between requests with equal salts. A request has no salt,
and its KV stays in this engine, if the engine cannot tell what the KV depends on.

Runs on the engine's main thread. Reads the files of LoRA adapters
(docs/decisions/047-salts-of-adapters-and-images.md).
"""

import hashlib
import json
import logging
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from vllm.lora.peft_helper import PEFTHelper
from vllm.v1.utils import tensor_data

from kvferry.weight_files import file_states
from vllm import envs

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""In the order in which vLLM looks for them; vLLM reads the first that exists."""
PEFT_FIELDS = frozenset(each.name for each in fields(PEFTHelper))
"""The keys of an adapter's configuration that vLLM reads. The other keys say where and how the
adapter was trained, and differ between copies of one adapter.
"""
LORA_SETTINGS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""The fields of vLLM's LoRA configuration that change the effect of an adapter."""
MEDIA_SETTINGS = (
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""The fields of vLLM's multimodal configuration that change what the model sees of an item. vLLM's
hash of the item covers only the arguments of the request.
"""
DIGEST_BYTES = 16

_log = logging.getLogger(__name__)

AdapterKey = tuple[str, str]
"""Name and path of an adapter: vLLM's prefix cache keeps the adapter's KV under both."""


# -- LoRA adapters --


@dataclass(slots=True)
class _SeenAdapter:
    """The files of an adapter at the first look."""

    states: tuple[tuple[int, ...], ...]
    digest: str | None
    """None once the files have changed."""


@dataclass(slots=True)
class LoadedAdapters:
    """The contents that the LoRA adapters of this engine had when the engine first loaded them.

    vLLM reads an adapter's files when it loads the adapter, again after it has evicted the adapter,
    and in every step if the adapter was loaded in place. So once the files have changed, the
    connector cannot know under which contents a request is computed, and vLLM's prefix cache still
    holds KV of the old contents. From then on the adapter has no digest.
    """

    settings: str = ""
    """The settings of the engine that change the effect of an adapter."""
    _seen: dict[AdapterKey, _SeenAdapter] = field(default_factory=dict, init=False)
    _owners: dict[int, AdapterKey] = field(default_factory=dict, init=False)
    """The adapter that vLLM's workers serve under each `lora_int_id`."""
    _warned: set[tuple[AdapterKey, str]] = field(default_factory=set, init=False)

    def watch_engine(self) -> None:
        """Look at each adapter when the engine loads it, which may be long before its first
        request. vLLM does not tell connectors, so this wraps the engine's method.
        """
        from vllm.v1.engine.core import EngineCore

        load = EngineCore.add_lora

        # `wraps` keeps the signature, by which vLLM decodes the arguments of remote calls.
        @wraps(load)
        def add_lora(core: Any, lora_request: Any) -> Any:
            self._look(_key(lora_request))
            is_loaded = load(core, lora_request)
            # This looks again, because the load may have downloaded the adapter first.
            self.note_loaded(lora_request)
            return is_loaded

        EngineCore.add_lora = add_lora

    def note_loaded(self, adapter: Any) -> None:
        """Note that the engine has loaded an adapter, or will load it for a new request."""
        key = _key(adapter)
        if adapter.load_inplace:
            self._owners[adapter.lora_int_id] = key
        else:
            # A worker that has any adapter under this id serves that one.
            self._owners.setdefault(adapter.lora_int_id, key)
        self._look(key)

    def digest(self, adapter: Any) -> str | None:
        """Return the digest of a request's adapter; None if vLLM may serve other contents."""
        key = _key(adapter)
        if self._owners.get(adapter.lora_int_id) != key:
            self._warn(
                key, f"vLLM serves another adapter under its lora_int_id {adapter.lora_int_id}"
            )
            return None
        return self._look(key)

    def _look(self, key: AdapterKey) -> str | None:
        """Compare an adapter's files with those of the first look and return their digest."""
        seen = self._seen.get(key)
        if seen is not None and seen.digest is None:
            return None
        try:
            files = _find_files(key[1])
            # States first, so that a later look notices files that change during the digest.
            states = file_states(files)
            if seen is None:
                seen = self._seen[key] = _SeenAdapter(states, _digest_files(*files, self.settings))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self._warn(key, f"its files cannot be read: {error}")
            return None
        if seen.states != states:
            seen.digest = None
            self._warn(
                key,
                "its files have changed since this engine loaded it; load changed adapters from a "
                "new path",
            )
        return seen.digest

    def _warn(self, key: AdapterKey, reason: str) -> None:
        """Log, once for each adapter and reason, why the KV of its requests stays here."""
        if (key, reason) not in self._warned:
            self._warned.add((key, reason))
            _log.warning(
                "KV of a LoRA adapter is not exchanged with peers adapter=%s path=%s reason=%s",
                *key,
                reason,
            )


def _key(adapter: Any) -> AdapterKey:
    return adapter.lora_name, adapter.lora_path


def _find_files(path: str) -> tuple[Path, Path]:
    """The configuration and the weights that vLLM reads for an adapter's path, which may be a name
    on the model hub.
    """
    folder = Path(path).expanduser()
    if not folder.is_absolute() and not folder.exists():
        cached = None if envs.VLLM_USE_MODELSCOPE else try_to_load_from_cache(path, CONFIG_NAME)
        folder = Path(cached).parent if isinstance(cached, str) else folder
    for name in WEIGHT_NAMES:
        if (folder / name).is_file():
            return folder / CONFIG_NAME, folder / name
    raise FileNotFoundError("none of them were found on this host")


def _digest_files(config: Path, weights: Path, settings: str) -> str:
    values = json.loads(config.read_text())
    # An absent key and an empty value mean the same to vLLM.
    meaning = {name: values[name] for name in PEFT_FIELDS & values.keys() if values[name]}
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(json.dumps([settings, meaning], sort_keys=True).encode())
    with weights.open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# -- salts --


@dataclass(slots=True)
class CacheSalts:
    """Computes the salts of one engine's requests."""

    adapters: LoadedAdapters
    numbers_media: bool
    """vLLM identifies images by a counter, which starts at 0 in every engine, not by a hash."""
    media_settings: str = ""
    """The settings of the engine that change what the model sees of an image."""
    _has_warned: bool = field(default=False, init=False)

    @classmethod
    def from_config(cls, vllm_config: Any) -> "CacheSalts":
        lora, media = vllm_config.lora_config, vllm_config.model_config.multimodal_config
        has_prefix_cache = vllm_config.cache_config.enable_prefix_caching
        return cls(
            LoadedAdapters(_settings(lora, LORA_SETTINGS)),
            media is not None and media.mm_processor_cache_gb == 0 and not has_prefix_cache,
            _settings(media, MEDIA_SETTINGS),
        )

    def note_request(self, request: Any) -> None:
        """Note a new request before vLLM schedules it."""
        if request.lora_request:
            self.adapters.note_loaded(request.lora_request)

    def has_lost_adapter(self, request: Any) -> bool:
        """Whether vLLM may serve another adapter than that of the request."""
        return self._adapter(request.lora_request) is None

    def salt(self, request: Any, weights_version: str) -> str | None:
        """Return the salt of a request; None if this engine cannot tell what the KV depends on."""
        adapter = self._adapter(request.lora_request)
        media = [self._item(feature) for feature in request.mm_features]
        if adapter is None or None in media:
            return None
        parts = [request.cache_salt, weights_version, adapter, media, _embeddings(request)]
        return json.dumps([*parts, self.media_settings if media else ""]) if any(parts) else ""

    def _adapter(self, adapter: Any) -> list[object] | None:
        if not adapter:
            return []
        digest = self.adapters.digest(adapter)
        return None if digest is None else [adapter.lora_name, digest, adapter.is_3d_lora_weight]

    def _item(self, feature: Any) -> list[object] | None:
        """Identify an image or another item, and the tokens that it replaces."""
        identity = self._content(feature.data) if self.numbers_media else feature.identifier
        if identity is None:
            return None
        return [feature.modality, identity, feature.mm_position.extract_embeds_range()]

    def _content(self, data: Any) -> str | None:
        """Return a digest of an item's processed tensors; None if they are in another process."""
        tensors = {} if data is None else data.get_data()
        if tensors and all(value is not None for value in tensors.values()):
            return _digest(sorted(tensors.items()))
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "KV of prompts with images is not exchanged with peers reason=vLLM numbers images "
                "instead of hashing them; start vLLM with --enable-prefix-caching, or without "
                "--mm-processor-cache-gb 0"
            )
        return None


def _settings(config: Any, names: Sequence[str]) -> str:
    return json.dumps([getattr(config, name, None) for name in names], sort_keys=True, default=str)


def _embeddings(request: Any) -> str:
    """Identify the embeddings of a prompt and their positions; empty for a prompt of tokens."""
    if request.prompt_embeds is None:
        return ""
    # In a prompt of tokens and embeddings, vLLM shows token id 0 where an embedding is.
    return _digest([request.prompt_embeds, bytes(request.prompt_is_token_ids or ())])


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in _parts(value):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yield the bytes of nested lists of tensors; different values never yield equal bytes."""
    if hasattr(value, "cpu"):
        yield f"tensor {value.dtype} {tuple(value.shape)}.".encode()
        yield tensor_data(value)
    elif isinstance(value, list | tuple):
        yield f"list {len(value)}.".encode()
        for part in value:
            yield from _parts(part)
    else:
        yield pickle.dumps(value)
