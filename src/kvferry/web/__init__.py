"""HTTP bodies that the engine's front-end and the router share: OpenAI-style errors, also for
requests that are not valid HTTP, and transfer records.
"""
