"""The `mooncake` data transport: Mooncake's Transfer Engine, in a process of its own."""
