"""The embedded engine: a small paged-KV engine with real weights and real tokens, no GPU needed."""
