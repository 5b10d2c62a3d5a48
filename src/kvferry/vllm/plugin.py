"""Called by vLLM in each of its processes (entry point group `vllm.general_plugins`), before its
configuration is used.

Registers our connectors, so that no module path is needed, and makes a word of the epoch that all
processes of one engine incarnation share. Makes NIXL safe to exit from, also for vLLM's own
NixlConnector, which may make its agent before ours (docs/decisions/042).
"""

import os
import secrets

from kvferry.transports.nixl.agent import load_distribution_netlink

__all__ = ["EPOCH_VARIABLE", "register"]

EPOCH_VARIABLE = "KVFERRY_VLLM_EPOCH"
NAMES = ("KVFerryConnector", "KVFerryPushConnector")


def register() -> None:
    # The API server runs first and the engine's processes inherit its environment.
    os.environ.setdefault(EPOCH_VARIABLE, secrets.token_hex(8))
    load_distribution_netlink()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in NAMES:
        if name not in KVConnectorFactory._registry:  # noqa: SLF001  vLLM has no question for it and refuses a second time
            KVConnectorFactory.register_connector(name, "kvferry.vllm", name)
