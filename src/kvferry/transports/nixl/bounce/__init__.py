"""Bounce buffers in front of NIXL: gather small segments, so that NIXL moves large ones."""
