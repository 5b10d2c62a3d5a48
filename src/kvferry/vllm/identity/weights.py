"""The files from which vLLM has read an engine's weights, and the folder of a model.

vLLM's own loader decides which files those are: its rules depend on the release, on the load format
and on what else lies in the folder (`consolidated*.safetensors` come first, wherever they are).
"""

from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader import DefaultModelLoader, get_model_loader

from kvferry.errors import ConfigError


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
