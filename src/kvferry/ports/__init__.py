"""What the core needs from the world, as Protocols with contract docstrings."""
