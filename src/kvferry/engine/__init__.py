"""The embedded paged-KV engine: real weights, real tokens, no GPU needed."""
