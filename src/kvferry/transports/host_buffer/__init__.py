"""Block stores, and host buffers that copy an engine's cache into host memory."""
