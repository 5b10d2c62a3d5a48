"""The OpenAI-compatible HTTP front-end of the embedded engine, in its own process."""
