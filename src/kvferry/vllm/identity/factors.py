"""What decides whether the KV of two vLLM engines is interchangeable: the model's identity.

The same tokens must give the same keys and values in both engines. So every setting of the model's
configuration is compared, and every option of vLLM that changes what the model computes. Options
that only change how fast, in which order or with which rounding vLLM computes it are not compared.
docs/decisions/045-what-changes-kv.md goes through all options of vLLM and says why.

Reads the configuration, the weight files and the files of a multimodal processor.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

import vllm
from kvferry.connectors.contract import ModelIdentity
from kvferry.errors import ConfigError
from kvferry.protocol.handshake import named_factors
from kvferry.protocol.messages import Factor
from kvferry.vllm.identity.loaded_weights import LoadedWeights
from kvferry.vllm.release import cache_release
from kvferry.weight_files import digest_files, files_changed_since
from vllm import envs

COMPARED_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "model_config": (
        "quantization",
        "quantization_config",
        "model_class_overrides",
        "code_revision",
    ),
    "cache_config": (
        "kv_cache_dtype_skip_layers",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
    ),
    "attention_config": (
        "backend_per_kind",
        "disable_flashinfer_q_quantization",
        "indexer_kv_dtype",
        "use_non_causal",
        "use_prefill_query_quantization",
    ),
    "diffusion_config": ("canvas_length", "max_denoising_steps"),
    "multimodal_config": (
        "media_io_kwargs",
        "mm_encoder_attn_dtype",
        "mm_processor_kwargs",
        "video_pruning_method",
        "video_pruning_rate",
    ),
}
"""Options that are compared as they are, by vLLM's configuration object. `model_identity` compares
the others that matter in a form of their own.
"""
STATE_OPTIONS = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
"""Compared for models with states only: peers of wire version 8 do not report these options, and a
factor that only one side reports counts as a difference.
"""
COMPARED_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
)
"""Environment variables that quantise activations, replace the routing of experts or arrange the
bytes of a block.
"""
COMPARED_IF_SET = ("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",)
"""Variables that earlier versions of kvferry or vLLM do not know: a factor that only one side
reports counts as a difference, so these are reported only where they have an effect.
"""
ORIGIN_KEYS = ("_commit_hash", "_name_or_path", "transformers_version")
"""Keys that name the origin of a configuration, at any depth."""
IRRELEVANT_KEYS = (
    *ORIGIN_KEYS,
    # The name of the remote code depends on whether the model was named by path or by hub name.
    "auto_map",
    # Compared in their resolved form, as `architecture` and `dtype`.
    "architectures",
    "dtype",
    "torch_dtype",
    # MiniMax M2 stores the option here, where it sizes a table; see `_length_settings`.
    "max_model_len",
    # How generation starts and ends.
    "bos_token_id",
    "eos_token_id",
    "tokenizer_class",
    # Training, and the outputs of Transformers.
    "attention_dropout",
    "chunk_size_feed_forward",
    "id2label",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
"""Keys of a model's configuration that do not change KV."""
KNOWN_CODE = sys.stdlib_module_names | {"torch", "typing_extensions", "vllm"}
"""Packages whose code is known by vLLM's release, or says nothing about KV."""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


_log = logging.getLogger(__name__)


def model_identity(
    vllm_config: Any, attention_backends: str, loaded: LoadedWeights | None = None
) -> ModelIdentity:
    """The identity of the engine's model. Only workers know the `attention_backends` and the
    `loaded` weights, and only the identities that workers report are compared: the scheduler's has
    no weights and no settings.
    """
    model = vllm_config.model_config
    is_worker = bool(attention_backends)
    loaded = loaded or LoadedWeights()
    return ModelIdentity(
        architecture=model.architecture,
        weights=_weights(vllm_config, loaded) if is_worker else "",
        num_layers=model.get_total_num_hidden_layers(),
        total_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        dtype=_dtype_name(model.dtype),
        cache_format=f"vllm {cache_release(vllm.__version__)} {attention_backends}",
        settings=_settings(vllm_config) | _code_factors(loaded.model) if is_worker else {},
    )


# -- weights --


def _weights(vllm_config: Any, loaded: LoadedWeights) -> str:
    """The weights in memory, if engines of any parallel size can compare them. Otherwise the files
    that vLLM has read; and in memory again if it has read none, but made the weights up or received
    them as a stream.
    """
    files = [] if loaded.is_comparable else weight_files(vllm_config, loaded.model)
    if loaded.model is not None and files:
        since_ns = int(psutil.Process().create_time() * 1e9)
        for path in files_changed_since(files, since_ns):
            _log.warning(
                "%s has changed since vLLM started, perhaps after vLLM read it, so the weights in "
                "memory are compared, which engines that compare files refuse; start the engine "
                "again",
                path,
            )
            files = []
    return f"files {digest_files(files, os.environ)}" if files else f"loaded {loaded.identity}"


def weight_files(vllm_config: Any, model: Any = None) -> list[Path]:
    """Return the files in the order in which vLLM reads them; none if the weights come from
    elsewhere, such as a stream. `model`: the loaded module, which may name further sources.
    """
    name, revision = vllm_config.model_config.model, vllm_config.model_config.revision
    if Path(name).is_file():
        return [Path(name)]
    loader = get_model_loader(vllm_config.load_config)
    if not isinstance(loader, DefaultModelLoader):
        return []
    main = DefaultModelLoader.Source(
        name,
        revision,
        fall_back_to_pt=getattr(model, "fall_back_to_pt_during_load", True),
        allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
    )
    files: list[Path] = []
    for source in (main, *getattr(model, "secondary_weights", ())):
        try:
            found = loader._prepare_weights(  # noqa: SLF001  the rule itself, not a copy of it
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the weight files of {source.model_or_path} cannot be found again, to compare "
                f"them with a peer's: {error}"
            ) from error
        files += sorted(map(Path, found[1]))
    return files


# -- settings --


def _settings(vllm_config: Any) -> dict[str, Factor]:
    model = vllm_config.model_config
    settings = {
        **_options(vllm_config),
        **{name: getattr(envs, name) for name in COMPARED_VARIABLES},
        **{name: value for name in COMPARED_IF_SET if (value := getattr(envs, name, ""))},
        **_length_settings(model),
        **_lora_settings(vllm_config),
        # How the convolutions of states lie in memory.
        **({"ssm_conv_state_layout": get_conv_state_layout()} if model.is_hybrid else {}),
    }
    return {
        **named_factors("config.", _configuration(model.hf_config)),
        **named_factors("", settings),
        **named_factors("", _processor_settings(vllm_config)),
    }


def _code_factors(model: Any) -> dict[str, Factor]:
    """The source files of the model's classes that come with neither vLLM nor torch: remote code of
    a checkpoint, plugins, Transformers. Their names say nothing about what they compute. With the
    files of the same package whose functions and classes they use.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__} if model else ()
    new, files = {kind.__module__ for kind in kinds}, dict[str, Path]()
    while new:
        name = new.pop()
        module = sys.modules.get(name)
        found = getattr(module, "__file__", None)
        if name in files or name.partition(".")[0] in KNOWN_CODE or not found:
            continue
        files[name] = Path(found)
        package = name.rpartition(".")[0]
        for value in tuple(vars(module).values()):
            origin = value.__name__ if isinstance(value, ModuleType) else _origin(value)
            if package and origin.rpartition(".")[0] == package:
                new.add(origin)
    digests: dict[str, list[str]] = {}
    for file in files.values():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()[:32]
        digests.setdefault(file.name, []).append(digest)
    return named_factors("code.", {name: " ".join(sorted(d)) for name, d in digests.items()})


def _origin(value: object) -> str:
    name = getattr(value, "__module__", None)
    return name if isinstance(name, str) else ""


def _configuration(config: Any) -> dict[str, object]:
    """The settings of a Hugging Face configuration, as vLLM changed it, without irrelevant keys.

    A declared setting that is None counts as absent, because another version of Transformers may
    not declare it. An undeclared one counts: code may have another default for it.
    """
    declared = {field.name for field in fields(config)} if is_dataclass(config) else set()
    settings = {}
    for name, value in config.to_dict().items():
        part = getattr(config, name, None)
        is_section = isinstance(value, dict) and hasattr(part, "model_type")
        if name not in IRRELEVANT_KEYS and not (value is None and name in declared):
            settings[name] = _configuration(part) if is_section else _without_origin(value)
    return settings


def _without_origin(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(name): _without_origin(part)
            for name, part in value.items()
            if name not in ORIGIN_KEYS
        }
    return [_without_origin(part) for part in value] if isinstance(value, list | tuple) else value


def _options(vllm_config: Any) -> dict[str, object]:
    options: dict[str, object] = {"additional_config": vllm_config.additional_config}
    for name, compared in COMPARED_OPTIONS.items():
        owner = vllm_config.model_config if name == "multimodal_config" else vllm_config
        config = getattr(owner, name)
        for option in compared if config is not None else ():
            if option in STATE_OPTIONS and not vllm_config.model_config.is_hybrid:
                continue
            value = getattr(config, option)
            options[option] = (
                asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
            )
    return options


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# -- options that are compared in a form of their own --


LENGTH_SIZES_ROPE = ("CohereCompass", "MiniMaxM2", "Plamo3")
"""Architectures that pass `max_model_len` on as the largest position of their rotary embedding."""
LENGTH_BOUNDS_IMAGES = ("Dots3Note", "NemotronH_")
"""Architectures whose processor cuts images or videos to what `max_model_len` has room for."""
LLAMA4_LONG_TOKENS = 32768


def _length_settings(model: Any) -> dict[str, object]:
    """`max_model_len`, as far as the model's KV depends on it.

    For most models the option only limits requests. LongRoPE has two tables of frequencies, and
    vLLM chooses by this option, once for all requests.
    """
    # With `--max-model-len auto`, vLLM shortens the option after it has built the model.
    is_auto = model.original_max_model_len == -1
    length = model.get_and_verify_max_len(-1) if is_auto else model.max_model_len
    architecture = model.architecture
    ropes = list(_ropes(_configuration(model.hf_config)))
    kinds = {rope["rope_type"] for rope in ropes}
    if architecture.startswith("Llama4"):
        chosen = {**model.try_get_generation_config(), **model.override_generation_config}
        is_tuned = chosen.get("attn_temperature_tuning", length > LLAMA4_LONG_TOKENS)
        return {"attn_temperature_tuning": bool(is_tuned)}
    if architecture.startswith(LENGTH_BOUNDS_IMAGES) or (
        architecture.startswith(LENGTH_SIZES_ROPE) and kinds & {"dynamic", "longrope"}
    ):
        return {"max_model_len": length}
    limits = {
        rope["original_max_position_embeddings"]
        for rope in ropes
        if rope["rope_type"] == "longrope"
    }
    compared = [
        f"more than {limit}" if length > limit else f"at most {limit}" for limit in sorted(limits)
    ]
    return {"max_model_len": ", ".join(compared)} if compared else {}


def _ropes(settings: Any) -> Iterator[Mapping[str, Any]]:
    """Every set of rope parameters in a configuration; models may have one per kind of layer."""
    if isinstance(settings, dict):
        if "rope_type" in settings:
            yield settings
        for part in settings.values():
            yield from _ropes(part)


def _lora_settings(vllm_config: Any) -> dict[str, object]:
    """How adapters are applied. An engine without LoRA has vLLM's defaults: it can exchange the KV
    of the base model with an engine that has LoRA.
    """
    lora, dtype = vllm_config.lora_config, vllm_config.model_config.dtype
    return {
        "lora_dtype": _dtype_name(lora.lora_dtype) if lora and lora.lora_dtype != dtype else "auto",
        "lora_target_modules": sorted(lora.target_modules or ["all"]) if lora else ["all"],
        "enable_tower_connector_lora": bool(lora and lora.enable_tower_connector_lora),
    }


def _processor_settings(vllm_config: Any) -> dict[str, object]:
    """The settings of a multimodal model's processor: the files beside the weights, and the scales
    of a quantised encoder.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    if model.multimodal_config is None:
        return {}
    folder = find_model(model.model, model.revision, load.download_dir)
    paths = [folder / name for name in PROCESSOR_FILES] if folder is not None else []
    settings: dict[str, object] = {
        path.name: _without_origin(json.loads(path.read_bytes()))
        for path in paths
        if path.is_file()
    }
    scales = model.multimodal_config.mm_encoder_fp8_scale_path
    if scales is not None:
        settings["mm_encoder_fp8_scale_path"] = Path(scales).read_text()
    return settings


def find_model(model: str, revision: str | None, download_dir: str | None) -> Path | None:
    """The folder, or the single file, of a model; None if it is not on this host."""
    if Path(model).exists():
        return Path(model)
    if "://" in model:
        return None
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(found)
