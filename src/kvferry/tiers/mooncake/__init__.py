"""The tier `mooncake`: objects in a Mooncake Store."""
