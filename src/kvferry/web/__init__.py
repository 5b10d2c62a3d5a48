"""What the engine's front-end and the router share of HTTP: OpenAI-style errors, transfer records
and API keys.
"""
