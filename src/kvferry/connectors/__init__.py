"""Connectors: the interface through which an engine transfers KV. `contract` defines the interface,
`factory` finds connector classes by name.
"""
