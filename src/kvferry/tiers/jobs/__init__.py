"""What a rank's offload worker does: its stores, loads, reads and writes. No thread, no I/O."""
