"""Starts real vLLM servers on this machine's GPU, many at once: each needs most of a minute and
little memory.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.harness import Engine
from tests.vllm.fleet import BY_MODULE_PATH, Fleet

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="this interpreter has no vLLM"
    ),
]
CONNECTORS = {
    "pull": BY_MODULE_PATH,
    "push": {**BY_MODULE_PATH, "kv_connector": "NixlPushConnector"},
}
HALF = ("--dtype", "bfloat16", "--attention-backend", "FLASH_ATTN")


class GpuFleet(Fleet):
    """Its servers run with the interpreter of the tests."""

    python = Path(sys.executable)
    on_gpu = True

    def start(
        self,
        name: str,
        *flags: str,
        mode: str | None = "pull",
        transfer: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        policy: str = "fail",
        environment: Mapping[str, str] | None = None,
    ) -> Engine:
        """Start a server; `mode=None`: one without a connector. `transfer` replaces the mode's."""
        return self.vllm(
            name,
            *flags,
            transfer=transfer or (None if mode is None else CONNECTORS[mode]),
            extra=extra,
            policy=policy,
            environment=environment,
        )
