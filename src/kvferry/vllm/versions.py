"""The vLLM versions this adapter was tested with."""

import logging

import vllm

__all__ = ["TESTED", "release", "warn_if_untested"]

TESTED = ("0.32.0",)

_log = logging.getLogger(__name__)


def warn_if_untested() -> None:
    """Once per process, because a connector is made once per process and role."""
    version = str(vllm.__version__).split("+")[0]
    if version not in TESTED:
        _log.warning("kvferry was tested with vLLM %s, this is %s: its connector interface may have changed", ", ".join(TESTED), version)


def release() -> str:
    """Major and minor version: what an arrangement of the cache is bound to."""
    return ".".join(str(vllm.__version__).split(".")[:2])
