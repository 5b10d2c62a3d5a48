"""kvferry inside vLLM: `"kv_connector_module_path": "kvferry.vllm"`. The only package that imports
vllm.

The connectors are imported on demand, because the plugin entry point runs in every vLLM process,
whatever connector the process uses.
"""

from importlib import import_module
from typing import Any

__all__ = [
    "DecodeBenchConnector",
    "ExampleConnector",
    "KVFerryConnector",
    "KVFerryDecodeBenchConnector",
    "KVFerryExampleConnector",
    "KVFerryMooncakeConnector",
    "KVFerryOffloadingConnector",
    "KVFerryPushConnector",
    "MooncakeConnector",
    "MultiConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "OffloadingConnector",
    "P2pNcclConnector",
]

_MODULES = {
    "KVFerryConnector": "connector",
    "MultiConnector": "multi",
    "NixlConnector": "connector",
    "NixlPullConnector": "connector",
}
"""The modules of connectors that are not in `connectors.py`."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvferry.vllm.release import check_release

        check_release()
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'connectors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
