"""kvferry carries the KV cache of a large language model from the engine that computed it to the
engine that needs it.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
