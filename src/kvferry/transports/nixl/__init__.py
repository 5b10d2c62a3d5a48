"""nixl."""
