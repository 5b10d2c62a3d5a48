"""kvferry moves the KV cache of a large language model from the engine that computed the cache to
the engine that decodes with the cache.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
