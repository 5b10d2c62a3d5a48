"""kvferry's connector without one compatibility factor: `max_model_len` is not compared. Servers of
the negative control in test_configurations.py load it by its module path.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvferry.connectors.contract import ModelIdentity
from kvferry.vllm import NixlConnector, translate

__all__ = ["NixlConnector"]

FORGOTTEN = "max_model_len"
_model_identity = translate.model_identity  # type: ignore[attr-defined]


def without_a_factor(
    vllm_config: Any, attention_backends: str, loaded: Any = None
) -> ModelIdentity:
    identity = _model_identity(vllm_config, attention_backends, loaded)
    settings: Mapping[str, Any] = identity.settings
    return replace(
        identity, settings={name: settings[name] for name in settings if name != FORGOTTEN}
    )


translate.model_identity = without_a_factor  # type: ignore[attr-defined]
