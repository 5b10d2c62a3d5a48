"""The packages that each extra of kvferry installs, and the check whether they are installed.

pyproject.toml has the same packages with their versions; `tests/packaging/test_extras.py` compares
the two.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from kvferry.errors import MissingDependency

_ROUTER = (
    "httptools",
    "prometheus_client",
    "uvloop",
)
_ENGINE = (
    "aiohttp",
    "huggingface_hub",
    "jinja2",
    "prometheus_client",
    "safetensors",
    "tokenizers",
    "torch",
    "uvloop",
)
_OBJECT = ("obstore",)
_MOONCAKE = ("mooncake",)
_TRACING = ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk")
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "router": _ROUTER,
    "engine": _ENGINE,
    "object": _OBJECT,
    "mooncake": _MOONCAKE,
    "tracing": _TRACING,
    "all": tuple(sorted({*_ROUTER, *_ENGINE, *_OBJECT, "rich"})),
}
"""The names under which the packages of an extra are imported."""


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed. Imports no package itself."""
    return [name for name in EXTRAS[extra] if not _is_installed(name)]


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is not installed
        return False


def check_extra(command: str, extra: str, needed: Sequence[str] | None = None) -> None:
    """Raise MissingDependency if a package that `command` needs is not installed.

    `needed` names the packages of the extra that the command needs; None: all of them.
    """
    missing = [
        name.replace("_", "-").replace(".", "-")
        for name in missing_packages(extra)
        if needed is None or name in needed
    ]
    if not missing:
        return
    packages, verb, them = (
        ("package", "is", "it") if len(missing) == 1 else ("packages", "are", "them")
    )
    raise MissingDependency(
        f"`{command}` needs the {packages} {', '.join(missing)}, which {verb} not installed; "
        f"install {them} with: pip install 'kvferry[{extra}]'"
    )
