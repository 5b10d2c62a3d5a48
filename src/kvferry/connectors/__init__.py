"""Connectors: what an engine calls to hand KV over or take it. `contract` is the interface,
`factory` finds classes by name.
"""
