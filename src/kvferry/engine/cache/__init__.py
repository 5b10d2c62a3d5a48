"""The paged KV cache of the embedded engine: blocks, prefix cache, allocation and memory layout."""
