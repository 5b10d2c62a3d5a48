"""Which bytes move between two caches: heads, axes, geometry, and the plan of a read. Pure."""
