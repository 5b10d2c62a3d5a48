"""Transports: move bytes between KV caches, and messages between transfer workers."""
