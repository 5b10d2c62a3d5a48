"""The `cuda_ipc` data transport: copies between GPU caches of processes on one host."""
