"""HTTP bodies that the engine's front-end and the router share: OpenAI-style errors and transfer
records.
"""
