"""Generates small checkpoints whose output depends on every KV block, for tests and demos."""
