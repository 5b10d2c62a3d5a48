"""The plugin entry point (`vllm.general_plugins`), which vLLM calls in each process before it uses
its configuration.

`register` does four things: it registers kvferry's connectors, so that no module path is needed;
it lets vLLM's connectors that need another package say which one, where the package is missing; it
sets the part of the epoch that all processes of one engine incarnation share; and it makes NIXL
safe to exit from, also for vLLM's own NixlConnector, which may create its agent first
(docs/decisions/042-two-copies-of-libnl.md).
"""

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.factory import ONLY_IN_VLLM
from kvferry.transports.nixl.agent import load_distribution_netlink

__all__ = ["EPOCH_VARIABLE", "register"]

EPOCH_VARIABLE = "KVFERRY_VLLM_EPOCH"
NAMES = ("KVFerryConnector", "KVFerryOffloadingConnector", "KVFerryPushConnector")


def register() -> None:
    """Register kvferry's connectors with vLLM. Idempotent."""
    # The API server process runs first, and the engine's processes inherit its environment.
    os.environ.setdefault(EPOCH_VARIABLE, secrets.token_hex(8))
    load_distribution_netlink()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001  no public query
            KVConnectorFactory.register_connector(name, "kvferry.vllm", name)
    # vLLM imports the children of a MultiConnector before it builds the MultiConnector.
    for name in ONLY_IN_VLLM:
        loader = KVConnectorFactory._registry.get(name)  # noqa: SLF001
        if loader is not None and not isinstance(loader, _ExplainedLoader):
            KVConnectorFactory._registry[name] = _ExplainedLoader(name, loader)  # noqa: SLF001


@dataclass(frozen=True)
class _ExplainedLoader:
    """Loads a connector class of vLLM's; an `ImportError` names the package that is missing."""

    name: str
    load: Callable[[], Any]

    def __call__(self) -> Any:
        try:
            return self.load()
        except ImportError as error:
            raise ImportError(
                f"{self.name} cannot be loaded ({error}); it needs {ONLY_IN_VLLM[self.name]} in "
                "vLLM's environment"
            ) from error
