"""The plugin entry point (`vllm.general_plugins`), which vLLM calls in each process before it uses
its configuration.

`register` does three things: it registers kvferry's connectors, so that no module path is needed;
it sets the part of the epoch that all processes of one engine incarnation share; and it makes NIXL
safe to exit from, also for vLLM's own NixlConnector, which may create its agent first
(docs/decisions/042-two-copies-of-libnl.md).
"""

import os
import secrets

from kvferry.transports.nixl.agent import load_distribution_netlink

EPOCH_VARIABLE = "KVFERRY_VLLM_EPOCH"
NAMES = (
    "KVFerryConnector",
    "KVFerryExampleConnector",
    "KVFerryMooncakeConnector",
    "KVFerryOffloadingConnector",
    "KVFerryPushConnector",
)


def register() -> None:
    """Register kvferry's connectors with vLLM. Idempotent."""
    # The API server process runs first, and the engine's processes inherit its environment.
    os.environ.setdefault(EPOCH_VARIABLE, secrets.token_hex(8))
    load_distribution_netlink()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001  no public query
            KVConnectorFactory.register_connector(name, "kvferry.vllm", name)
