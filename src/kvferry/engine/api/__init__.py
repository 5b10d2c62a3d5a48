"""The OpenAI-compatible HTTP front-end of the embedded engine; the front-end runs in its own
process.
"""
