"""Settings that are set only by environment variables, and the search for a model's folder.

The caller passes the environment. Pure, except that `find_checkpoint` reads the file system.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from kvferry.config.fields import shown
from kvferry.errors import ConfigError
from kvferry.types import KVLayout

__all__ = [
    "fault_spec_from_environment",
    "find_checkpoint",
    "ignored_variables",
    "kv_cache_layout_from_environment",
]


# A variable of vLLM that kvferry replaces by `kv_lease_duration`.
OLD_TIMEOUT = "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"
LAYOUT_NAMES = ("KVFERRY_KV_CACHE_LAYOUT", "VLLM_KV_CACHE_LAYOUT")


def kv_cache_layout_from_environment(environ: Mapping[str, str]) -> KVLayout:
    """The cache layout: KVFERRY_KV_CACHE_LAYOUT, else VLLM_KV_CACHE_LAYOUT, else HND. With HND the
    tokens of a head are adjacent, so a slice of heads is one segment.
    """
    for name in LAYOUT_NAMES:
        text = environ.get(name, "").strip()
        if text:
            if text not in KVLayout.__members__:
                raise ConfigError(f"{name} must be one of HND, NHD, got {shown(text)}")
            return KVLayout(text)
    return KVLayout.HND


def fault_spec_from_environment(environ: Mapping[str, str]) -> str:
    """KVFERRY_FAULTS: faults that data transports inject on purpose in tests; empty for none."""
    return environ.get("KVFERRY_FAULTS", "").strip()


def ignored_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that operators set for vLLM and that kvferry does not read."""
    if not environ.get(OLD_TIMEOUT, "").strip():
        return []
    return [
        f"{OLD_TIMEOUT} has no effect here; set kv_lease_duration in kv_connector_extra_config "
        "(seconds, 30 by default)"
    ]


# -- checkpoint --
# Finds a model's files: a folder, or a name that another tool has already downloaded. Reads the
# file system and downloads nothing.


REVISION = re.compile(r"[A-Za-z0-9_-]{1,128}")
HUB_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}(/[A-Za-z0-9._-]{1,96})?")


def find_checkpoint(model: str, environ: Mapping[str, str]) -> Path:
    """The folder of a model given as a folder or as `owner/name` in the Hugging Face cache. Raises
    `ConfigError` if there is none.
    """
    folder = _expanded(model)
    if folder is not None and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"MODEL is {shown(model)}, a folder without config.json; name the folder of a "
                "Hugging Face checkpoint"
            )
        return folder
    if HUB_NAME.fullmatch(model):
        cached = _newest_snapshot(_hub_cache(environ) / f"models--{model.replace('/', '--')}")
        if cached is not None:
            return cached
    raise ConfigError(
        f"MODEL is {shown(model)}, which is neither a folder nor in the Hugging Face cache; "
        "kvferry does not download models: name a folder, or make a tiny model with `kvferry "
        "make-model DIR`"
    )


def _expanded(model: str) -> Path | None:
    try:
        return Path(model).expanduser() if model and "\0" not in model else None
    # `expanduser` found no home directory of the named user.
    except RuntimeError:
        return None


def _hub_cache(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    home = environ.get("HF_HOME") or str(
        Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME", "/")) / ".cache")
        / "huggingface"
    )
    return Path(home) / "hub"


def _newest_snapshot(repository: Path) -> Path | None:
    """The snapshot of revision `main` if its files exist; otherwise the newest snapshot."""
    found = [*_main_snapshot(repository), *_snapshots_newest_first(repository)]
    return next((path for path in found if (path / "config.json").is_file()), None)


def _main_snapshot(repository: Path) -> list[Path]:
    try:
        revision = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return []
    return [repository / "snapshots" / revision] if REVISION.fullmatch(revision) else []


def _snapshots_newest_first(repository: Path) -> list[Path]:
    try:
        return sorted(
            (repository / "snapshots").iterdir(),
            key=lambda path: path.stat().st_mtime,
            reverse=True,
        )
    except OSError:
        return []
