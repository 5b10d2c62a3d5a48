"""kvferry inside vLLM: `"kv_connector_module_path": "kvferry.vllm"`. The only package that imports
vllm.

The connectors are imported on demand, because the plugin entry point runs in every vLLM process,
whatever connector the process uses.
"""

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


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvferry.vllm.release import check_release

        check_release()
        if name == "MultiConnector":
            from kvferry.vllm.multi import MultiConnector

            return MultiConnector
        if name == "P2pNcclConnector":
            from kvferry.vllm.p2p_nccl import P2pNcclConnector

            return P2pNcclConnector
        from kvferry.vllm import connector, step_loading

        return getattr(step_loading if name in step_loading.__all__ else connector, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
