"""The `nixl` data transport: moves KV over every network that NIXL supports."""
