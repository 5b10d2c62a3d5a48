"""kvferry inside real vLLM: `"kv_connector_module_path": "kvferry.vllm"`. The only importer of vllm."""

from kvferry.vllm.connector import KVFerryConnector, NixlConnector

__all__ = ["KVFerryConnector", "NixlConnector"]
